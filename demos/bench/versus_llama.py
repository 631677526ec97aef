"""Edge on one peer against llama.cpp, in one call and in turn: the machine's mood is shared.

python -m edge.demos.bench.versus_llama --llama-python OTHER_ENVIRONMENT/bin/python --form Q4_K_M

How far each format is from float32 is told by edge.demos.bench.quality: speeds of unlike
quality say little.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import edge
from edge.api.versus_llama_cpp import Comparison, Llama, compare
from edge.demos.bench import results
from edge.demos.bench.file_shapes import FILE_SHAPES
from edge.demos.bench.limited.sides import gguf_of
from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import SHAPES, checkpoint, described
from edge.weights.formats import Dtype


def figures_of(measured: Comparison, form: str) -> Figures:
    """Both programs' figures and the ratio, for each thing that was compared."""
    found = Figures()
    for name, pairs in (
        (f"prefill {measured.prompt_tokens}", measured.prefill),
        (f"decode {measured.new_tokens}", measured.decode),
        (f"decode {measured.requests} at once", measured.batch),
    ):
        for ours, theirs in pairs:
            found.add(f"{name}, Edge", "tok/s", ours)
            found.add(f"{name}, llama.cpp {form}", "tok/s", theirs)
            found.add(f"{name}, Edge / llama.cpp", "ratio", ours / theirs)
    if measured.batch:
        for (many, _), (one, _) in zip(measured.batch, measured.decode, strict=True):
            found.add(f"Edge, {measured.requests} at once / one", "ratio", many / one)
    return found


@click.command()
@click.option("--llama-python", required=True, help="A Python with llama-cpp-python and gguf.")
@click.option(
    "--shape",
    type=click.Choice([*SHAPES, *FILE_SHAPES]),
    default="W",
    show_default=True,
    help=f"Of {' and '.join(FILE_SHAPES)} there is a file alone.",
)
@click.option("--form", default="Q4_K_M", show_default=True, help="llama.cpp's, and of its file.")
@click.option("--same-file", is_flag=True, help="Edge takes llama.cpp's file, too.")
@click.option("--dtype", default="int4", show_default=True)
@click.option("--block-size", type=int, help="Of --dtype, if not its own.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--requests", type=int, default=1, show_default=True, help="Also this many at once.")
@click.option("--rounds", type=int, default=7, show_default=True)
@folder_option
@append_option
def main(
    llama_python: str,
    shape: str,
    form: str,
    same_file: bool,
    dtype: Dtype,
    block_size: int | None,
    threads: int,
    folder: Path,
    append: bool,
    **options: Any,
) -> None:
    """Prefill and decode of both, with the ratio of each round."""
    if shape in FILE_SHAPES and not same_file:
        raise click.UsageError(f"{shape} is a GGUF file, which both take: add --same-file")
    made = FILE_SHAPES[shape] if shape in FILE_SHAPES else SHAPES[shape]
    context, requests = options["prompt_tokens"] + options["new_tokens"], options["requests"]
    gguf = gguf_of(shape, folder, python=llama_python, form=form)
    ours = f"{form} as stored" if same_file else f"{dtype}/{block_size}" if block_size else dtype
    with (
        Llama(
            gguf, python=llama_python, threads=threads, context_tokens=context, requests=requests
        ) as llama,
        edge.Cluster.local(1, threads=threads) as cluster,
        cluster.load(
            gguf if same_file else checkpoint(shape, folder),
            dtype="auto" if same_file else dtype,
            block_size=block_size,
            context_tokens=context,
            concurrency=requests,
        ) as model,
    ):
        measured = compare(model, llama, **options)
    results.publish(
        figures_of(measured, form).metrics(),
        question="one peer against llama.cpp, in turn",
        variant=f"{ours}, {threads} threads; llama-cpp-python {measured.version} {form}",
        link="none",
        model=described(shape, made.num_parameters),
        keep=append,
    )


if __name__ == "__main__":
    sys.exit(main())
