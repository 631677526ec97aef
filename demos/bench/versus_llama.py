"""Edge on one peer beside llama.cpp, in one call and in turn, so that the machine's mood is shared.

python -m demos.bench.versus_llama --llama-python OTHER_ENVIRONMENT/bin/python --block-size 128
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

import edge
from demos.bench import llama_side, results
from demos.bench.results import Metric
from demos.bench.shapes import SHAPES, checkpoint
from edge.paths import cache_root


class Llama:
    """llama.cpp in a process of its own, asked line by line."""

    def __init__(self, python: str, folder: Path, gguf: Path, threads: int, context: int) -> None:
        arguments = [str(folder), str(gguf), str(threads), str(context)]
        self._process = subprocess.Popen(
            [python, llama_side.__file__, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.version = str(self._answer()["version"])

    def run(self, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt_tokens} {new_tokens}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's side ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(
    model: edge.Model, llama: Llama, *, prompt_tokens: int, new_tokens: int, rounds: int
) -> list[Metric]:
    """Each round runs both once; the ratio is taken within the round."""
    prompt = np.random.default_rng(1).integers(model.vocab_size, size=prompt_tokens).tolist()
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        figures = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True).statistics
        other = llama.run(prompt_tokens, new_tokens)
        if number == 0:
            continue  # a warm-up of both
        ours.append((prompt_tokens / figures["first_token_s"], figures["tokens_per_s"]))
        theirs.append((prompt_tokens / other["prefill_s"], (new_tokens - 1) / other["decode_s"]))
    metrics: list[Metric] = []
    for index, name in enumerate((f"prefill {prompt_tokens}", f"decode {new_tokens}")):
        mine, other_s = [pair[index] for pair in ours], [pair[index] for pair in theirs]
        ratio = [a / b for a, b in zip(mine, other_s, strict=True)]
        metrics += [
            Metric(name=f"{name}, Edge", unit="tok/s", values=mine),
            Metric(name=f"{name}, llama.cpp Q4_0", unit="tok/s", values=other_s),
            Metric(name=f"{name}, Edge / llama.cpp", unit="ratio", values=ratio),
        ]
    return metrics


@click.command()
@click.option("--llama-python", required=True, help="A Python with llama-cpp-python and gguf.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="W", show_default=True)
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--append", is_flag=True, help="Add the figures to results.csv.")
def main(
    llama_python: str,
    shape: str,
    block_size: int,
    threads: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    folder: Path | None,
    append: bool,
) -> None:
    """Prefill and decode of both, with the ratio of each round."""
    folder = folder or cache_root() / "bench"
    path = checkpoint(shape, folder)
    context = prompt_tokens + new_tokens
    llama = Llama(llama_python, path, folder / f"{shape}-q4_0.gguf", threads, context)
    try:
        with edge.Cluster.local(1, threads=threads) as cluster:
            model = cluster.load(path, block_size=block_size, context_tokens=context)
            metrics = compare(
                model, llama, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds
            )
    finally:
        llama.close()
    rows = results.rows(
        metrics,
        question="one peer against llama.cpp, in turn",
        variant=f"int4/{block_size}, {threads} threads; llama-cpp-python {llama.version} Q4_0",
        link="none",
        model=f"{shape} ({SHAPES[shape].num_parameters / 1e9:.2g} B, random)",
    )
    results.show(rows)
    if append:
        results.append(rows)


if __name__ == "__main__":
    sys.exit(main())
