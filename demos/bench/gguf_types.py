"""Whether Edge computes what llama.cpp does on one GGUF file, for each type of tensor.

python -m edge.demos.bench.gguf_types --llama-python OTHER_ENVIRONMENT/bin/python --append

The model is a small Llama of random weights, all matrices of one type, as llama.cpp's own quantiser
makes them. Both programs read the same tokens. What the numbers in the file give in float64 is
computed by transformers: so it is known whose doing it is where they differ. Both round the inputs
of products to 8 bits, and random weights expect many tokens nearly alike. Edge with accuracy high
does not round them so: what it makes of a file is what it read in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import edge
from edge.demos.bench import gguf_file, llama_logits, results
from edge.demos.bench.file_shapes import FileShape, Tensor
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Metric
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.planning.load_options import LoadOptions
from edge.weights.formats import ACCURACIES, Dtype

QUESTION = "whether Edge computes what llama.cpp does on one GGUF file"
TYPES = ("F32", *llama_logits.TYPES)
FLOATS = ("F32", "F16", "BF16")
ROUNDED_TO = {"F16": "float16", "BF16": "bfloat16"}
"""What llama.cpp rounds the inputs of products with such matrices to, and torch's name of that."""
POSITIONS = 256
WINDOWS = 4
"""Windows of `POSITIONS` positions each, from an empty context."""

_HIDDEN, _COLUMNS, _LAYERS, _VOCAB = 512, 1024, 4, 512
_HEADS, _KV_HEADS, _HEAD = 8, 4, 64

Logits = NDArray[np.float32]


def small_llama() -> FileShape:
    """Rows of whole blocks of 256, so that every type can hold every matrix."""
    tensors: list[Tensor] = [
        ("token_embd.weight", (_VOCAB, _HIDDEN), None),
        ("output_norm.weight", (_HIDDEN,), 1.0),
        ("output.weight", (_VOCAB, _HIDDEN), None),
    ]
    query, key = _HEADS * _HEAD, _KV_HEADS * _HEAD
    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        tensors += [
            (f"{block}attn_norm.weight", (_HIDDEN,), 1.0),
            (f"{block}attn_q.weight", (query, _HIDDEN), None),
            (f"{block}attn_k.weight", (key, _HIDDEN), None),
            (f"{block}attn_v.weight", (key, _HIDDEN), None),
            (f"{block}attn_output.weight", (_HIDDEN, query), None),
            (f"{block}ffn_norm.weight", (_HIDDEN,), 1.0),
            (f"{block}ffn_gate.weight", (_COLUMNS, _HIDDEN), None),
            (f"{block}ffn_up.weight", (_COLUMNS, _HIDDEN), None),
            (f"{block}ffn_down.weight", (_HIDDEN, _COLUMNS), None),
        ]
    return FileShape(
        architecture="llama",
        metadata={
            "block_count": _LAYERS,
            "context_length": POSITIONS,
            "embedding_length": _HIDDEN,
            "feed_forward_length": _COLUMNS,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": _KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": _HEAD,
            "rope.freq_base": 1e4,
            "vocab_size": _VOCAB,
        },
        tensors=tuple(tensors),
    )


def exact_logits(file: Path, windows: NDArray[np.int64], inputs: str | None = None) -> Logits:
    """Float32 [windows, tokens, vocab] of the numbers in a file, computed in float64.

    inputs: a dtype of torch that those of products are rounded to; None: of none.
    """
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float64
    )

    def rounded(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = given
        return first.to(getattr(torch, str(inputs))).double(), *others

    for module in model.modules():
        if inputs is not None and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        found: Logits = model(torch.from_numpy(windows)).logits.float().numpy()
    return found


def edge_logits(file: Path, windows: NDArray[np.int64], accuracy: Accuracy) -> Logits:
    """The same of Edge, with the numbers in the file as they are: it would round floats."""
    dtype: Dtype = "float32" if file.stem in FLOATS else "auto"
    options = LoadOptions(dtype=dtype, accuracy=accuracy)
    with (
        edge.Cluster.local(1, threads=2) as cluster,
        cluster.load(file, options, context_tokens=POSITIONS) as model,
    ):
        return np.stack([model.logits(window) for window in windows.tolist()])


def compared(found: Mapping[str, Logits]) -> list[Metric]:
    """Metrics of each program's logits by name, the first of which are exact: the share of
    positions whose likeliest token is the exact one, and the distance from those logits, as a share
    of their norm. For the next two also the share of positions where they have the same likeliest
    token."""
    (_, exact), *others = found.items()
    metrics: list[Metric] = []
    for name, logits in others:
        distance = 100 * float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
        metrics.append(Metric(name=f"{name}, same top", unit="%", values=[same_top(exact, logits)]))
        metrics.append(Metric(name=f"{name}, distance", unit="%", values=[distance]))
    (one, a), (other, b), *_ = others
    both = f"{one} and {other}, same top"
    return [*metrics, Metric(name=both, unit="%", values=[same_top(a, b)])]


def rounding_of_inputs(
    kind: str, llama: Logits, file: Path, windows: NDArray[np.int64]
) -> list[Metric]:
    """How near llama.cpp is to float64 where inputs are rounded to the type of their matrix, as it
    has them; of floats that are rounded to at all."""
    dtype = ROUNDED_TO.get(kind)
    if dtype is None:
        return []
    rounded = exact_logits(file, windows, dtype)
    distance = 100 * float(np.linalg.norm(llama - rounded) / np.linalg.norm(rounded))
    name = f"llama.cpp and float64 with inputs in {dtype}"
    return [
        Metric(name=f"{name}, same top", unit="%", values=[same_top(rounded, llama)]),
        Metric(name=f"{name}, distance", unit="%", values=[distance]),
    ]


def same_top(one: Logits, other: Logits) -> float:
    """Percent of positions."""
    return 100 * float((one.argmax(-1) == other.argmax(-1)).mean())


def look_at(python: str, kinds: Sequence[str], folder: Path, *, append: bool) -> None:
    """A block of figures for each type."""
    random = np.random.default_rng(0)
    windows = random.integers(3, _VOCAB, (WINDOWS, POSITIONS))
    tokens, logits = folder / "tokens.npy", folder / "logits.npy"
    np.save(tokens, windows)
    (folder / "facts.json").write_text(json.dumps(small_llama().facts()))
    floats = folder / "F32.gguf"
    _run(python, gguf_file.__file__, folder / "facts.json", floats, "F32")
    for kind in kinds:
        file = folder / f"{kind}.gguf"
        if file != floats:
            _run(python, llama_logits.__file__, "encode", floats, file, kind)
        _run(python, llama_logits.__file__, "read", file, tokens, logits)
        found: dict[str, Logits] = {"float64": exact_logits(file, windows)}
        found["llama.cpp"] = np.load(logits)
        for accuracy in ACCURACIES:
            found[f"Edge {accuracy}"] = edge_logits(file, windows, accuracy)
        print(kind)
        results.publish(
            compared(found) + rounding_of_inputs(kind, found["llama.cpp"], file, windows),
            question=QUESTION,
            variant=kind,
            link="none",
            model=f"Llama of {_LAYERS} layers of {_HIDDEN}, random weights",
            keep=append,
        )


def _run(python: str, *arguments: Path | str) -> None:
    subprocess.run([python, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@click.command()
@click.option("--llama-python", required=True, help="A Python with llama-cpp-python and gguf.")
@click.option("--type", "kinds", type=click.Choice(TYPES), multiple=True, help="[default: all]")
@append_option
def main(llama_python: str, kinds: tuple[str, ...], append: bool) -> None:
    """For each type: how far either program is from float64, and where they differ."""
    with tempfile.TemporaryDirectory() as folder:
        look_at(llama_python, kinds or TYPES, Path(folder), append=append)


if __name__ == "__main__":
    sys.exit(main())
