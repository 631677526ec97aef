"""Whether Edge computes what llama.cpp does on one GGUF file, for each type of tensor."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

import edge
from edge.demos.bench import case, llama_logits
from edge.demos.bench.case import Found, Given
from edge.demos.bench.llama_files import gguf_of
from edge.demos.bench.quality import Logits, reference_logits
from edge.demos.bench.results import Figures
from edge.demos.shapes import SHAPES
from edge.planning.load_options import LoadOptions
from edge.weights.formats import ACCURACIES

TYPES = ("F32", *llama_logits.TYPES)
SHAPE = "blocks"
_ROUNDED_TO = {"F16": "float16", "BF16": "bfloat16"}
"""What llama.cpp rounds the inputs of products with such matrices to, and torch's name of that."""
_WINDOWS, _POSITIONS = 4, 256
"""Windows of positions, each from an empty context."""


@case.case(
    "whether Edge computes what llama.cpp does on one GGUF file",
    case.LLAMA_PYTHON,
    click.option("--type", "types", type=click.Choice(TYPES), multiple=True, help="[default: all]"),
)
def gguf_types(given: Given) -> Iterator[Found]:
    """For each type of tensor: how far either program is from float64, and where they differ.

    The model is a small Llama of random weights, all matrices of one type, as llama.cpp's own
    quantiser makes them. What the numbers in the file give in float64 is computed by transformers:
    so it is known whose doing it is where they differ. Both round the inputs of products to 8 bits,
    and random weights expect many tokens nearly alike. Edge with accuracy high does not round them
    so: what it makes of a file is what it read in it.
    """
    shape = SHAPES[SHAPE]
    windows = np.random.default_rng(0).integers(3, shape.vocab_size, (_WINDOWS, _POSITIONS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens, logits = folder / "tokens.npy", folder / "logits.npy"
        np.save(tokens, windows)
        floats = gguf_of(SHAPE, folder, python=given.llama_python, form="F32")
        for kind in given.types or TYPES:
            file = floats if kind == "F32" else folder / f"{kind}.gguf"
            if file != floats:
                _llama(given.llama_python, "encode", floats, file, kind)
            _llama(given.llama_python, "read", file, tokens, logits)
            found = {
                "float64": reference_logits(file, windows, "float64"),
                "llama.cpp": np.load(logits),
                **{f"Edge {each}": _edge_logits(file, windows, each, kind) for each in ACCURACIES},
            }
            figures = compared(found)
            if (inputs := _ROUNDED_TO.get(kind)) is not None:
                exact = reference_logits(file, windows, "float64", inputs=inputs)
                _add(figures, f"llama.cpp and float64 with inputs in {inputs}", exact, found)
            yield Found(
                figures=figures,
                variant=kind,
                link="none",
                model=f"Llama of {shape.num_layers} layers of {shape.hidden_size}, random weights",
            )


def compared(found: Mapping[str, Logits]) -> Figures:
    """Metrics of each program's logits by name, the first of which are exact: the share of
    positions whose likeliest token is the exact one, and the distance from those logits, as a share
    of their norm. For the next two also the share of positions where they have the same likeliest
    token."""
    (_, exact), *others = found.items()
    figures = Figures()
    for name, _logits in others:
        _add(figures, name, exact, found, name)
    (one, a), (other, b), *_ = others
    figures.add(f"{one} and {other}, same top", "%", _same_top(a, b))
    return figures


def _add(
    figures: Figures, name: str, exact: Logits, found: Mapping[str, Logits], of: str = "llama.cpp"
) -> None:
    distance = float(np.linalg.norm(found[of] - exact) / np.linalg.norm(exact))
    figures.add(f"{name}, same top", "%", _same_top(exact, found[of]))
    figures.add(f"{name}, distance", "%", 100 * distance)


def _same_top(one: Logits, other: Logits) -> float:
    """Percent of positions."""
    return 100 * float((one.argmax(-1) == other.argmax(-1)).mean())


def _edge_logits(file: Path, windows: NDArray[np.int64], accuracy: str, kind: str) -> Logits:
    """Logits from the numbers in the file as they are: Edge would round floats."""
    options = LoadOptions(
        dtype="float32" if kind in ("F32", *_ROUNDED_TO) else "auto",
        accuracy=accuracy,  # type: ignore[arg-type]  # one of ACCURACIES
    )
    with (
        edge.Cluster.local(1, threads=2) as cluster,
        cluster.load(file, options, context_tokens=_POSITIONS) as model,
    ):
        return np.stack([model.logits(window) for window in windows.tolist()])


def _llama(python: str, *arguments: Path | str) -> None:
    command = [python, llama_logits.__file__, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
