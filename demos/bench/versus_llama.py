"""Edge on one peer beside llama.cpp, in one call and in turn, so that the machine's mood is shared.

python -m demos.bench.versus_llama --llama-python OTHER_ENVIRONMENT/bin/python --block-size 128
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

import edge
from demos.bench import results
from demos.bench.limited.sides import gguf_of
from demos.bench.options import append_option, folder_option, shape_option
from demos.bench.results import Metric
from demos.bench.shapes import checkpoint, described
from edge.api.versus_llama_cpp import Comparison, Llama, compare


def rows_of(measured: Comparison) -> list[Metric]:
    """Both programs' figures and the ratio, for each thing that was compared."""
    found: list[Metric] = []
    for name, pairs in (
        (f"prefill {measured.prompt_tokens}", measured.prefill),
        (f"decode {measured.new_tokens}", measured.decode),
        (f"decode {measured.requests} at once", measured.batch),
    ):
        if pairs:
            ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
            ratio = [a / b for a, b in pairs]
            found += [
                Metric(name=f"{name}, Edge", unit="tok/s", values=ours),
                Metric(name=f"{name}, llama.cpp Q4_0", unit="tok/s", values=theirs),
                Metric(name=f"{name}, Edge / llama.cpp", unit="ratio", values=ratio),
            ]
    if measured.batch:
        gain = [
            many / one for (many, _), (one, _) in zip(measured.batch, measured.decode, strict=True)
        ]
        found.append(
            Metric(name=f"Edge, {measured.requests} at once / one", unit="ratio", values=gain)
        )
    return found


@click.command()
@click.option("--llama-python", required=True, help="A Python with llama-cpp-python and gguf.")
@shape_option()
@click.option("--block-size", type=int, default=32, show_default=True)
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
    block_size: int,
    threads: int,
    prompt_tokens: int,
    new_tokens: int,
    requests: int,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Prefill and decode of both, with the ratio of each round."""
    path = checkpoint(shape, folder)
    context = prompt_tokens + new_tokens
    gguf = gguf_of(shape, folder, python=llama_python)
    with (
        Llama(
            gguf, python=llama_python, threads=threads, context_tokens=context, requests=requests
        ) as llama,
        edge.Cluster.local(1, threads=threads) as cluster,
        cluster.load(
            path, block_size=block_size, context_tokens=context, concurrency=requests
        ) as model,
    ):
        measured = compare(
            model,
            llama,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            requests=requests,
            rounds=rounds,
        )
    rows = results.rows(
        rows_of(measured),
        question="one peer against llama.cpp, in turn",
        variant=f"int4/{block_size}, {threads} threads; llama-cpp-python {measured.version} Q4_0",
        link="none",
        model=described(shape),
    )
    results.publish(rows, keep=append)


if __name__ == "__main__":
    sys.exit(main())
