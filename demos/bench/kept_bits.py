"""A GGUF file in its own bits and packed for ONNX Runtime, in turn, in one limit of memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

import edge
from edge.demos.bench import case, without_kernels
from edge.demos.bench.case import Found, Given
from edge.demos.bench.disk import drop_page_cache
from edge.demos.bench.limited import CONTEXT_TOKENS, MIB, PREFIX, Loaded
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import in_turn
from edge.demos.control_groups import ControlGroup, remove_groups_of_the_dead
from edge.demos.limited_peer import KERNEL_BYTES, LimitedPeer, limited_peer

OWN, PACKED = "own bits", "packed"
PROGRAMS = {OWN: "edge", PACKED: without_kernels.__name__}


@case.case(
    "a GGUF file in its own bits and packed, in one limit of memory",
    case.FILE,
    case.number("--memory", 500, "MiB of the limit."),
    case.number("--new-tokens", 16),
    case.rounds(5),
    case.number("--threads", 2),
    case.FOLDER,
)
def kept_bits(given: Given) -> Iterator[Found]:
    """The memory that holds the whole file with and without Edge's own kernels, and how fast both
    decode where neither fits. Needs root on Linux, for control groups."""
    if given.file is None:
        raise click.UsageError("name a GGUF file with --file")
    figures = Figures()
    peer = partial(limited_peer, cache=given.folder / "limited", threads=given.threads)
    budget = given.memory << 20
    whole = {name: _whole_bytes(given, partial(peer, program=PROGRAMS[name])) for name in PROGRAMS}
    for name, needed in whole.items():
        figures.add(f"holds the file, {name}", "MiB", needed / MIB)
    figures.add(f"holds the file, {OWN} / {PACKED}", "ratio", whole[OWN] / whole[PACKED])
    remove_groups_of_the_dead(PREFIX)
    drop_page_cache()
    with contextlib.ExitStack() as stack:
        sides = {}
        for at, (name, program) in enumerate(PROGRAMS.items()):
            group = stack.enter_context(
                ControlGroup(
                    f"{PREFIX}-{os.getpid()}-{at}",
                    memory_bytes=budget + KERNEL_BYTES,
                    disk=given.folder,
                )
            )
            one = stack.enter_context(peer(memory_bytes=budget, group=group, program=program))
            cluster = stack.enter_context(edge.Cluster.connect([one.address]))
            model = stack.enter_context(_load(cluster, given, stream="on"))
            loaded = Loaded(model, [one], [group])
            sides[name] = lambda _number, loaded=loaded: loaded.reply(given.new_tokens)[1:]
        for turn in in_turn(sides, given.rounds):
            for name, (speed, read) in turn.items():
                figures.add(f"decode, {name}", "tok/s", speed)
                figures.add(f"read for a token, {name}", "MB", read / 1e6)
            figures.add(f"decode, {OWN} / {PACKED}", "ratio", turn[OWN][0] / turn[PACKED][0])
    yield Found(
        figures=figures,
        variant=f"{given.file.name} in {given.memory} MiB, {given.threads} threads",
        link="none",
        model=given.model,
    )


def _load(cluster: edge.Cluster, given: Given, **options: Any) -> edge.Model:
    """Its peer is measured before, so that what it keeps in memory is chosen by measured rates."""
    options |= {"context_tokens": CONTEXT_TOKENS, "speculate": "off"}
    cluster.propose(given.path, **options)
    return cluster.load(given.path, **options)


def _whole_bytes(
    given: Given, peer: Callable[[], contextlib.AbstractContextManager[LimitedPeer]]
) -> int:
    """What a peer takes in all that holds the file without streaming."""
    with (
        peer() as free,
        edge.Cluster.connect([free.address]) as cluster,
        _load(cluster, given) as model,
    ):
        Loaded(model, [free]).reply(2)
        (row,) = model.proposal.rows
        weights, kv = int(row.memory.weight_bytes), int(row.memory.kv_bytes)
        return weights + kv + free.stated_bytes()
