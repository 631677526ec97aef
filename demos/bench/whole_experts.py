"""Experts as wholes against columns of every one, on two peers with unlike memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import in_turn, random_prompt
from edge.demos.limited_peer import limited_peer
from edge.planning.load_options import ExpertCut, LoadOptions

CUTS: tuple[ExpertCut, ...] = ("columns", "whole")
PROMPT_TOKENS = 32
MIB = float(1 << 20)


@contextlib.contextmanager
def _two_peers(cache: Path, memory_bytes: int | None) -> Iterator[edge.Cluster]:
    """One that is told to take no more than this, and one that takes what it wants."""
    peer = functools.partial(limited_peer, cache=cache, threads=1)
    with (
        peer(name="small", memory_bytes=memory_bytes) as small,
        peer(name="large") as large,
        edge.Cluster.connect([small.address, large.address]) as cluster,
    ):
        yield cluster


def _room_bytes(path: Path, cache: Path, options: LoadOptions, share: float) -> int:
    """What a peer must be told to have room for this share of the weights."""
    with _two_peers(cache, None) as cluster:
        proposal = cluster.propose(path, options)
    weights = sum(row.memory.weight_bytes for row in proposal.rows)
    row = min(proposal.rows, key=lambda each: each.name != "small")
    overhead = proposal.overhead[row.device]
    beside = overhead.floor_bytes + overhead.buffer_bytes + row.memory.kv_bytes
    return beside + int(share * weights)


@case.case(
    "experts as wholes, on two peers with unlike memory, in turn",
    case.shape("E"),
    case.block_size(128),
    click.option("--share", type=click.FloatRange(0.05, 0.5), default=0.25, show_default=True,
                 help="Of the weights, what the small one has room for."),
    case.number("--new-tokens", 96, least=8),
    case.rounds(5),
    case.FOLDER,
)  # fmt: skip
def whole_experts(given: Given) -> Iterator[Found]:
    """What is gained by cutting between experts instead of through each of them.

    Both peers have one core of this machine. One has no room for more than a part of the model. By
    columns it does as large a part of the work; of whole experts it has those that most tokens go
    through, as the model's own text told. Each plan is predicted.
    """
    path, cache, found = given.path, given.folder / "whole_experts", Figures()
    options = LoadOptions(
        plan="tensor",
        dtype="int4-pure",
        block_size=given.block_size,
        stream="off",
        speculate="off",
        context_tokens=512,
    )
    new_tokens = given.new_tokens
    memory_bytes = _room_bytes(path, cache, options, given.share)
    with _two_peers(cache, memory_bytes) as cluster:
        counted = cluster.count_experts(path, options)
        found.add("uses of the busiest quarter of experts", "share", counted.busiest_quarter)

        def answer(cut: ExpertCut, number: int) -> tuple[float, float | None, float]:
            """Tokens per second, those that were predicted, and the weights of the small peer."""
            with cluster.load(path, options, experts=cut) as model:
                prompt = random_prompt(model, PROMPT_TOKENS, number)
                model.generate(prompt, max_new_tokens=8, ignore_eos=True)
                reply = model.generate(
                    prompt, max_new_tokens=new_tokens, temperature=1.0, seed=number, ignore_eos=True
                )
                said = model.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=new_tokens)
                (small,) = (row for row in model.proposal.rows if row.name == "small")
            predicted = None if said is None else said.tokens_per_s
            return reply.tokens_per_s, predicted, small.memory.weight_bytes / MIB

        for turn in in_turn({cut: partial(answer, cut) for cut in CUTS}, given.rounds):
            for cut, (speed, predicted, small) in turn.items():
                found.add(f"decode {new_tokens}, {cut}", "tok/s", speed)
                if predicted is not None:
                    found.add(f"decode {new_tokens}, {cut} / predicted", "ratio", speed / predicted)
                found.add(f"weights of the small one, {cut}", "MiB", small)
            found.add("whole / columns", "ratio", turn["whole"][0] / turn["columns"][0])
    yield Found(
        figures=found,
        variant=f"int4-pure/{given.block_size}, {given.share:.0%} of the weights on one",
        model=given.model,
    )
