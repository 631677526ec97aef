"""Exports of torch modules with random weights: any module, and some that are written here."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPSET = 18
Made = tuple[str, str, bytes, str]
"""Kind, name, the graph, and its inputs as in `graph_packages.GRAPHS`."""


def exported(
    module: Any,
    inputs: Mapping[str, Any],
    free: Mapping[str, Mapping[int, str]] | None = None,
    *,
    pick: Callable[[Any], Any] = lambda out: out[0],
    new: bool = False,
) -> bytes:
    """An export of a torch module. pick: what it gives of its result. new: by torch.export."""
    import torch

    class Picked(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = module.eval()

        def forward(self, *given: Any) -> Any:
            return pick(self.inner(**dict(zip(inputs, given, strict=True))))

    given, held = tuple(inputs.values()), io.BytesIO()
    options: dict[str, Any] = {"dynamic_axes": free, "do_constant_folding": True}
    if new:
        options = {"dynamic_shapes": (tuple(dict((free or {}).get(name, {})) for name in inputs),)}
    graph = module if isinstance(module, torch.jit.ScriptModule) else Picked().eval()
    with torch.no_grad():
        program = torch.onnx.export(
            graph, given, None if new else held, dynamo=new, opset_version=OPSET,
            input_names=list(inputs), **options,
        )  # fmt: skip
    content: bytes = program.model_proto.SerializeToString() if new else held.getvalue()
    return content


def of_torch() -> Iterator[Made]:
    import torch
    from torch import nn

    class Recurrent(nn.Module):  # type: ignore[misc]
        """A GRU and an LSTM, with their states as inputs and outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 16, num_layers=2, bidirectional=True)
            self.lstm = nn.LSTM(32, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Any, g: Any, h: Any, c: Any) -> Any:
            y, g = self.gru(x, g)
            y, (h, c) = self.lstm(y, (h, c))
            return self.head(torch.tanh(y)), g, h, c

    inputs = {
        "x": torch.randn(5, 1, 8), "g": torch.zeros(4, 1, 16), "h": torch.zeros(1, 1, 16),
        "c": torch.zeros(1, 1, 16),
    }  # fmt: skip
    free = {"x": {0: "t"}}
    yield "recurrent", "gru-lstm", exported(Recurrent(), inputs, free, pick=tuple), "x=7,1,8"

    class Net(nn.Module):  # type: ignore[misc]
        """A U-Net of three levels."""

        def __init__(self) -> None:
            super().__init__()
            widths = (3, 8, 16, 32)
            pairs = list(itertools.pairwise(widths))
            self.down = nn.ModuleList(self.block(a, b) for a, b in pairs)
            self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[:0:-1])
            self.joined = nn.ModuleList(self.block(2 * a, a) for a, _b in pairs[:0:-1])

        def block(self, a: int, b: int) -> Any:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())

        def forward(self, x: Any) -> Any:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = kept.pop()
            for up, joined in zip(self.up, self.joined, strict=True):
                x = joined(torch.cat([up(x), kept.pop()], dim=1))
            return (x,)

    free = {"x": {0: "n", 2: "h", 3: "w"}}
    yield (
        "segmentation",
        "unet",
        exported(Net(), {"x": torch.randn(1, 3, 32, 32)}, free),
        "x=2,3,48,32",
    )

    class Steps(nn.Module):  # type: ignore[misc]
        """A loop whose length is an input, with a choice inside and one behind it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            for number in range(int(count)):
                if number % 2 == 0:  # noqa: SIM108
                    x = torch.tanh(self.inner(x))
                else:
                    x = x + self.first(x)
            if bool(x.sum() > 0):  # noqa: SIM108
                x = self.last(x)
            else:
                x = self.inner(x) * 2
            return torch.softmax(self.first(x), -1)

    inputs = {"x": torch.randn(2, 8), "count": torch.tensor(3)}
    yield (
        "control flow",
        "steps",
        exported(torch.jit.script(Steps()), inputs, {"x": {0: "n"}}),
        "x=2,8 count:3",
    )
