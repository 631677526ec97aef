"""What every back end promises, and how one is chosen.

A back end is one module of this package, imported only when chosen.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.formats import WeightFormat
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from offload import Manifest
from transport import Collective

BACKENDS = ("ort",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWeights:
    """The weights of one shard on disk: one file, and what lies where in it."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One chunk of one request, the same on every shard of the plan.

    `tokens` are the ids at `position` …; `logit_rows` of them want logits, counted from the end.
    """

    request: str
    position: int
    tokens: tuple[int, ...]
    logit_rows: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class StageProgram(Protocol):
    """One shard, ready to run. Called from one thread only.

    `forward` returns the hidden state float32 [1, tokens, hidden] of a stage, or in the last stage
    this shard's logits float32 [logit_rows, len(vocab)]. The array is the program's own buffer,
    valid until the next call.
    """

    weight_bytes: int

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        """`hidden` [1, tokens, hidden] comes from the stage before; None in the first stage.

        A request's KV cache is made at its first step. Raises what the collective raises.
        """
        ...

    def receive_buffer(self, num_tokens: int) -> NDArray[np.float32]:
        """Where a hidden state for `forward` may be received without a copy."""
        ...

    def release(self, request: str) -> None:
        """Free the request's KV cache; unknown requests are ignored."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One kind of device's way to run a shard."""

    name: str

    def why_not(self) -> str | None:
        """None if it runs here, else one sentence with the cause and the remedy."""
        ...

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        context_tokens: int,
        chunk_tokens: int,
    ) -> StageProgram: ...


def open_backend(name: str, *, threads: int) -> Backend:
    """Raises RequestError for an unknown name or one that cannot run here."""
    if name not in BACKENDS:
        raise RequestError(f"back end {name!r} is not one of {', '.join(BACKENDS)}")
    module: Any = importlib.import_module(f"edge.backends.{name}")
    backend: Backend = module.open_backend(threads=threads)
    reason = backend.why_not()
    if reason is not None:
        raise RequestError(f"back end {name} cannot run here: {reason}")
    return backend
