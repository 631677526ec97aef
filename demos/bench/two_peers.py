"""What a second peer gains on one machine, beside the most that its second core can gain.

python -m demos.bench.two_peers --shape W --block-size 128

Three arrangements answer in turn: one peer with one thread, two such peers in tensor parallel over
loopback TCP, and one peer with two threads. The last has no messages and shares the same memory, so
what it gains over the first is what this machine has to give.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import numpy as np

import edge
from demos.bench import results
from demos.bench.options import append_option, folder_option, shape_option
from demos.bench.results import Metric
from demos.bench.shapes import checkpoint, described

ARRANGEMENTS = {
    "1 x 1 thread": (1, 1, "auto"),
    "2 x 1 thread": (2, 1, "tensor"),
    "1 x 2 threads": (1, 2, "auto"),
}
"""Peers, threads of each, and the plan."""

Figures = dict[str, list[tuple[float, float]]]
"""(prefill, decode) in tokens per second of each round, by arrangement."""


def measure(
    path: Path, *, block_size: int, prompt_tokens: int, new_tokens: int, rounds: int
) -> Figures:
    """All arrangements loaded at once, answering one after the other in each round."""
    found: Figures = {name: [] for name in ARRANGEMENTS}
    with contextlib.ExitStack() as stack:
        models = {}
        for name, (peers, threads, plan) in ARRANGEMENTS.items():
            cluster = stack.enter_context(edge.Cluster.local(peers, threads=threads))
            models[name] = stack.enter_context(
                cluster.load(
                    path,
                    plan=plan,  # type: ignore[arg-type]
                    block_size=block_size,
                    context_tokens=prompt_tokens + new_tokens,
                )
            )
        vocab_size = models["1 x 1 thread"].vocab_size
        prompt = np.random.default_rng(1).integers(vocab_size, size=prompt_tokens).tolist()
        for number in range(rounds + 1):
            for name, model in models.items():
                reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
                figures = reply.statistics
                if number:  # the first round warms up
                    pair = prompt_tokens / figures["first_token_s"], reply.tokens_per_s
                    found[name].append(pair)
    return found


def rows_of(found: Figures, *, prompt_tokens: int, new_tokens: int) -> list[Metric]:
    """The speeds, and within each round the gain over one core."""
    metrics: list[Metric] = []
    for index, what in enumerate((f"prefill {prompt_tokens}", f"decode {new_tokens}")):
        speed = {name: [pair[index] for pair in pairs] for name, pairs in found.items()}
        one = speed["1 x 1 thread"]
        metrics += [
            Metric(name=f"{what}, {name}", unit="tok/s", values=values)
            for name, values in speed.items()
        ]
        metrics += [
            Metric(
                name=f"{what}, {name} / one core",
                unit="ratio",
                values=[a / b for a, b in zip(speed[name], one, strict=True)],
            )
            for name in ("2 x 1 thread", "1 x 2 threads")
        ]
    return metrics


@click.command()
@shape_option()
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@folder_option
@append_option
def main(
    shape: str,
    block_size: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Prefill and decode of the three arrangements, with the gain of each round."""
    found = measure(
        checkpoint(shape, folder),
        block_size=block_size,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
    )
    rows = results.rows(
        rows_of(found, prompt_tokens=prompt_tokens, new_tokens=new_tokens),
        question="two peers against one core, in turn",
        variant=f"int4/{block_size}, float32 wire",
        link="TCP over loopback",
        model=described(shape),
    )
    results.publish(rows, keep=append)


if __name__ == "__main__":
    main()
