"""A model in stages on daemons that are apart, or on one peer of its own."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import click

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Given
from edge.demos.bench.clusters.bed import open_bed
from edge.demos.bench.clusters.table import Device
from edge.memory.shard_memory import with_streamed
from edge.partition import Plan, Stage, whole_shard
from edge.planning.choosing import facts_of
from edge.weights.checkpoint import Checkpoint

STAGES = (
    case.number("--stages", 1, "More than 1: on daemons with a wire between them (needs root)."),
    case.number("--delay-ms", 20, "From one of these daemons to another."),
    case.number("--streamed", 0, "Layers that one peer reads from disk.", least=0),
)


def arrangement(given: Given) -> str:
    """In the words of results.csv."""
    how = f", {given.streamed} layers from disk" if given.streamed else ""
    if given.stages > 1:
        how = f", {given.delay_ms} ms apart"
    return f"{given.stages} x {given.threads} threads{how}"


def model_in_stages(stack: contextlib.ExitStack, given: Given, **options: Any) -> edge.Model:
    """The model of a case with STAGES, until the stack closes."""
    if given.stages == 1:
        local = stack.enter_context(edge.Cluster.local(1, threads=given.threads))
        if given.streamed:
            whole = local.propose(given.path, measure="nothing", **options).plan
            options["plan"] = with_streamed(whole, 0, 0, given.streamed)
        return stack.enter_context(local.load(given.path, **options))
    if given.streamed:
        raise click.UsageError("--streamed is for one peer")
    devices = [
        Device(name=f"stage-{number}", core=number % 2, delay_s=given.delay_ms / 2e3)
        for number in range(given.stages)
    ]
    cluster = stack.enter_context(
        edge.Cluster.connect(stack.enter_context(open_bed(devices, given.folder / "bed")).addresses)
    )
    with Checkpoint.open(given.path) as checkpoint:
        wanted = edge.LoadOptions(**options)
        facts = facts_of(checkpoint, wanted, wanted.limits(checkpoint.spec))
    bounds = [facts.num_layers * number // given.stages for number in range(given.stages + 1)]
    stages = []
    for peer, (first, end) in zip(cluster.peers, pairwise(bounds), strict=True):
        outer = first == 0 or end == facts.num_layers
        vocab = range(facts.vocab_size if outer else 0)
        stages.append(
            Stage(layers=range(first, end), shards=(whole_shard(peer.id, facts, vocab=vocab),))
        )
    plan = Plan(model=facts.name, version=0, stages=tuple(stages))
    return stack.enter_context(cluster.load(given.path, plan=plan, progress=False, **options))
