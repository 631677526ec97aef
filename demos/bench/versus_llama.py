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
from edge.demos.shapes import SHAPES, checkpoint, described
from edge.offload import GgufFile
from edge.weights.formats import Dtype

TABLE, HEAD = "token_embd.weight", "output.weight"


def read_of_token(path: Path) -> float:
    """Bytes of a GGUF file that a token is multiplied with: not of a table of embeddings that is no
    head, and of a layer's experts as many as it goes through."""
    with GgufFile(path) as file:
        model = file.metadata["general.architecture"]
        used, count = (
            int(str(file.metadata.get(f"{model}.expert_{each}", 1)))
            for each in ("used_count", "count")
        )
        total = 0.0
        for name, tensor in file.tensors.items():
            if name != TABLE or HEAD not in file.tensors:
                nbytes = tensor.end - tensor.begin
                total += nbytes * (used / count if "_exps." in name else 1)
        return total


def figures_of(measured: Comparison, form: str, *, read_bytes: tuple[float, float]) -> Figures:
    """Both programs' figures and the ratio, for each thing that was compared.

    read_bytes: weights that Edge, and llama.cpp, read for a token. With both at one rate, the ratio
    of decoding would be that of llama.cpp's bytes to Edge's.
    """
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
    mine, others = read_bytes
    found.add("weights for a token, Edge", "MB", mine / 1e6)
    found.add(f"weights for a token, llama.cpp {form}", "MB", others / 1e6)
    found.add("weights for a token, llama.cpp / Edge", "ratio", others / mine)
    for ours, theirs in measured.decode:
        found.add("rate of weights, Edge", "GB/s", ours * mine / 1e9)
        found.add(f"rate of weights, llama.cpp {form}", "GB/s", theirs * others / 1e9)
        found.add("rate of weights, Edge / llama.cpp", "ratio", ours * mine / (theirs * others))
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
    help=f"Of {' and '.join(FILE_SHAPES)} there are files alone: Edge rounds one in F16.",
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
    made = FILE_SHAPES[shape] if shape in FILE_SHAPES else SHAPES[shape]
    context, requests = options["prompt_tokens"] + options["new_tokens"], options["requests"]
    gguf = gguf_of(shape, folder, python=llama_python, form=form)
    if same_file:
        given = gguf
    elif shape in FILE_SHAPES:
        given = gguf_of(shape, folder, python=llama_python, form="F16")
    else:
        given = checkpoint(shape, folder)
    ours = f"{form} as stored" if same_file else f"{dtype}/{block_size}" if block_size else dtype
    with (
        Llama(
            gguf, python=llama_python, threads=threads, context_tokens=context, requests=requests
        ) as llama,
        edge.Cluster.local(1, threads=threads) as cluster,
        cluster.load(
            given,
            dtype="auto" if same_file else dtype,
            block_size=block_size,
            context_tokens=context,
            concurrency=requests,
        ) as model,
    ):
        measured = compare(model, llama, **options)
        read_bytes = sum(model.token_weight_bytes.values()), read_of_token(gguf)
    results.publish(
        figures_of(measured, form, read_bytes=read_bytes).metrics(),
        question="one peer against llama.cpp, in turn",
        variant=f"{ours}, {threads} threads; llama-cpp-python {measured.version} {form}",
        link="none",
        model=described(shape, made.num_parameters),
        keep=append,
    )


if __name__ == "__main__":
    sys.exit(main())
