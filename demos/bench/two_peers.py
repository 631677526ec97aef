"""What a second peer gains on one machine, and the most that its second core can gain.

python -m edge.demos.bench.two_peers --shape W --block-size 128

Three arrangements answer in turn: one peer with one thread, two such peers in tensor parallel over
loopback TCP, and one peer with two threads. The last has no messages and shares the same memory, so
what it gains over the first is what this machine has to give.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.shapes import checkpoint, described

ARRANGEMENTS = {
    "1 x 1 thread": (1, 1, "auto"),
    "2 x 1 thread": (2, 1, "tensor"),
    "1 x 2 threads": (1, 2, "auto"),
}
"""Peers, threads of each, and the plan."""


def measure(
    path: Path, *, block_size: int, prompt_tokens: int, new_tokens: int, rounds: int
) -> Figures:
    """Speeds, and within each round the gain over one core.

    All arrangements are loaded at once, and answer one after the other in each round.
    """
    found = Figures()
    with contextlib.ExitStack() as stack:
        models = {}
        for name, (peers, threads, plan) in ARRANGEMENTS.items():
            cluster = stack.enter_context(edge.Cluster.local(peers, threads=threads))
            models[name] = stack.enter_context(
                cluster.load(
                    path,
                    plan=plan,  # type: ignore[arg-type]
                    dtype="int4-pure",
                    block_size=block_size,
                    context_tokens=prompt_tokens + new_tokens,
                )
            )
        vocab_size = models["1 x 1 thread"].vocab_size
        chance = np.random.default_rng(1)
        for number in range(rounds + 1):
            prompt = chance.integers(vocab_size, size=prompt_tokens).tolist()  # none is found again
            prefill, decode = {}, {}
            for name, model in models.items():
                reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
                prefill[name] = prompt_tokens / reply.statistics["first_token_s"]
                decode[name] = reply.tokens_per_s
            if not number:  # the first round warms up
                continue
            for what, speed in (
                (f"prefill {prompt_tokens}", prefill),
                (f"decode {new_tokens}", decode),
            ):
                for name in ARRANGEMENTS:
                    found.add(f"{what}, {name}", "tok/s", speed[name])
                for name in ("2 x 1 thread", "1 x 2 threads"):
                    gain = speed[name] / speed["1 x 1 thread"]
                    found.add(f"{what}, {name} / one core", "ratio", gain)
    return found


@click.command()
@shape_option()
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@folder_option
@append_option
def main(shape: str, block_size: int, folder: Path, append: bool, **options: Any) -> None:
    """Prefill and decode of the three arrangements, with the gain of each round."""
    found = measure(checkpoint(shape, folder), block_size=block_size, **options)
    results.publish(
        found.metrics(),
        question="two peers against one core, in turn",
        variant=f"int4-pure/{block_size}, float32 wire",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
