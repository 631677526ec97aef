"""Experts as wholes against columns of every one, on two peers with unlike memory.

python -m edge.demos.bench.whole_experts --shape E

Both peers have one core of this machine, and links over loopback. One has no room for more than a
part of the model. By columns it does as large a part of the work; of whole experts it has those
that most tokens go through, as the model's own text told. Plans answer in turn, and each is
predicted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.limited_peer import limited_peer
from edge.demos.shapes import checkpoint, described
from edge.planning.load_options import ExpertCut, LoadOptions

CUTS: tuple[ExpertCut, ...] = ("columns", "whole")
PROMPT_TOKENS = 32


@contextlib.contextmanager
def two_peers(cache: Path, memory_bytes: int | None) -> Iterator[edge.Cluster]:
    """One that is told to take no more than this, and one that takes what it wants."""
    peer = functools.partial(limited_peer, cache=cache, threads=1)
    with (
        peer(name="small", memory_bytes=memory_bytes) as small,
        peer(name="large") as large,
        edge.Cluster.connect([small.address, large.address]) as cluster,
    ):
        yield cluster


def room_bytes(path: Path, cache: Path, options: LoadOptions, share: float) -> int:
    """What a peer must be told to have room for this share of the weights."""
    with two_peers(cache, None) as cluster:
        proposal = cluster.propose(path, options)
    weights = sum(row.memory.weight_bytes for row in proposal.rows)
    row = min(proposal.rows, key=lambda each: each.name != "small")
    overhead = proposal.overhead[row.device]
    beside = overhead.floor_bytes + overhead.buffer_bytes + row.memory.kv_bytes
    return beside + int(share * weights)


def measure(
    path: Path, cache: Path, *, block_size: int, share: float, new_tokens: int, rounds: int
) -> Figures:
    options = LoadOptions(
        plan="tensor", dtype="int4-pure", block_size=block_size, stream="off", context_tokens=512
    )
    found = Figures()
    memory_bytes = room_bytes(path, cache, options, share)
    with two_peers(cache, memory_bytes) as cluster:
        counted = cluster.count_experts(path, options)
        found.add("uses of the busiest quarter of experts", "share", counted.busiest_quarter)
        for number in range(rounds + 1):
            speeds = {}
            for cut in CUTS:
                with cluster.load(path, options, experts=cut) as model:
                    chance = np.random.default_rng(number)
                    prompt = chance.integers(model.vocab_size, size=PROMPT_TOKENS).tolist()
                    model.generate(prompt, max_new_tokens=8, ignore_eos=True)
                    reply = model.generate(
                        prompt, max_new_tokens=new_tokens, temperature=1.0, seed=number,
                        ignore_eos=True,
                    )  # fmt: skip
                    predicted = model.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=new_tokens)
                    (small,) = (row for row in model.proposal.rows if row.name == "small")
                speeds[cut] = reply.tokens_per_s
                if not number:  # the first round ships and warms up
                    continue
                found.add(f"decode {new_tokens}, {cut}", "tok/s", speeds[cut])
                if predicted is not None:
                    ratio = speeds[cut] / predicted.tokens_per_s
                    found.add(f"decode {new_tokens}, {cut} / predicted", "ratio", ratio)
                found.add(f"weights of the small one, {cut}", "MiB", _mib(small))
            if number:
                found.add("whole / columns", "ratio", speeds["whole"] / speeds["columns"])
    return found


def _mib(row: Any) -> float:
    return float(row.memory.weight_bytes) / (1 << 20)


@click.command()
@shape_option(default="E")
@click.option("--block-size", type=int, default=128, show_default=True)
@click.option("--share", type=click.FloatRange(0.05, 0.5), default=0.25, show_default=True,
              help="Of the weights, what the small one has room for.")  # fmt: skip
@click.option("--new-tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@folder_option
@append_option
def main(shape: str, folder: Path, append: bool, **options: Any) -> None:
    """Decode of both, predicted and measured."""
    found = measure(checkpoint(shape, folder), folder / "whole_experts", **options)
    results.publish(
        found.metrics(),
        question="experts as wholes, on two peers with unlike memory, in turn",
        variant=f"int4-pure/{options['block_size']}, {options['share']:.0%} of the weights on one",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
