"""Plans written by hand, so that tests do not depend on what the partitioner prefers; an
assignment to one peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from edge.demos.bundled import MODEL
from edge.models.experts import Experts
from edge.models.spec import ModelSpec
from edge.partition import LayerSlice, Plan, Shard, Stage
from edge.protocol.assignment import Assignment
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.weights.checkpoint import Checkpoint
from tests.support.formats import uniform_format

DEVICES = tuple(f"local-{number}" for number in range(1, 6))
"""The names of the peers that `Cluster.local(peers=5)` starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What each shard of a stage gets of each thing, as weights; 0 is nothing at all."""

    heads: tuple[int, ...] = (1,)
    ffn_columns: tuple[int, ...] = (1,)
    vocab: tuple[int, ...] = (1,)


ALONE = Shares()
TWO = Shares(heads=(3, 1), ffn_columns=(1, 3), vocab=(2, 5))
THREE = Shares(heads=(2, 0, 3), ffn_columns=(0, 2, 1), vocab=(1, 4, 0))
"""Without heads: the second. Without ffn columns: the first. Without vocabulary: the third."""
FIVE = Shares(heads=(1, 2, 0, 1, 2), ffn_columns=(2, 0, 3, 1, 1), vocab=(0, 1, 1, 3, 1))

LAYOUTS: Mapping[str, tuple[tuple[int, Shares], ...]] = {
    "solo": ((4, ALONE),),
    "pipeline_2": ((1, ALONE), (3, ALONE)),
    "pipeline_3": ((2, ALONE), (1, ALONE), (1, ALONE)),
    "tensor_2": ((4, TWO),),
    "tensor_3": ((4, THREE),),
    "tensor_5": ((4, FIVE),),
    "mixed_2x2": ((1, TWO), (3, TWO)),
    "mixed_2_then_3": ((3, TWO), (1, THREE)),
}
"""Stages of a model of four layers: (layers, what its shards get)."""


def slices(*parts: tuple[range, range]) -> list[LayerSlice]:
    """Of each kind of layer, by its key and value heads and its columns."""
    return [LayerSlice(heads=heads, ffn_columns=columns) for heads, columns in parts]


def streaming(plan: Plan, count: int) -> Plan:
    """The plan with up to `count` layers of every shard on disk."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    replace(shard, streamed_layers=min(count, len(stage.layers)))
                    for shard in stage.slices
                ),
            )
            for stage in plan.stages
        ),
    )


def with_whole_experts(plan: Plan, spec: ModelSpec, *, seed: int = 0) -> Plan:
    """The plan with experts as wholes in stages of several shards: uneven numbers of them, and in
    each layer others."""
    random = Random(seed)
    stages = []
    for stage in plan.stages:
        blocks = {layer: spec.layer(layer).feed_forward for layer in stage.layers}
        sparse = {layer: each for layer, each in blocks.items() if isinstance(each, Experts)}
        if len(stage.shards) == 1 or not sparse:
            stages.append(stage)
            continue
        layer, block = next(iter(sparse.items()))
        kind = spec.layers[layer]
        ranks = [n for n, each in enumerate(stage.slices) if each.slice(kind).ffn_columns]
        cuts = [0, *sorted(random.sample(range(1, block.num_experts), len(ranks) - 1))]
        cuts.append(block.num_experts)
        own: list[list[tuple[int, ...]]] = [[] for _ in stage.shards]
        for layer in stage.layers:
            order = random.sample(range(block.num_experts), block.num_experts)
            for rank, experts in enumerate(own):
                experts.append(())
                if layer in sparse and rank in ranks:
                    place = ranks.index(rank)
                    experts[-1] = tuple(sorted(order[cuts[place] : cuts[place + 1]]))
        shards = tuple(
            shard.with_experts(tuple(experts) if rank in ranks else ())
            for rank, (shard, experts) in enumerate(zip(stage.slices, own, strict=True))
        )
        stages.append(replace(stage, shards=shards))
    return replace(plan, stages=tuple(stages))


def make_plan(
    spec: ModelSpec,
    name: str,
    *,
    model: str,
    column_multiple: int = 1,
    devices: Sequence[str] = DEVICES,
) -> Plan:
    """The layout called `name`; a model of four layers is cut as it says, others in proportion.
    Of a name behind "whole " with experts as wholes.

    Feed-forward columns are cut on multiples of `column_multiple` (the block size of a quantised
    format), so a shard may get none of them there.
    """
    if name.startswith("whole "):
        usual = make_plan(
            spec, name[6:], model=model, column_multiple=column_multiple, devices=devices
        )
        return with_whole_experts(usual, spec)
    layout = LAYOUTS[name]
    layers = _cut(spec.num_layers, [count for count, _shares in layout])
    next_device = iter(devices).__next__
    outer = {0, len(layout) - 1}
    return Plan(
        model=model,
        version=0,
        stages=tuple(
            Stage(
                layers=layers[number],
                shards=_shards(spec, shares, next_device, column_multiple, outer=number in outer),
            )
            for number, (_count, shares) in enumerate(layout)
        ),
    )


def bundled_plan(name: str, *, devices: Sequence[str] = DEVICES) -> Plan:
    """The layout called `name` for the model that ships, in whatever format."""
    with Checkpoint.open(MODEL) as checkpoint:
        return make_plan(
            checkpoint.spec, name, model=checkpoint.name, column_multiple=32, devices=devices
        )


def _shards(
    spec: ModelSpec,
    shares: Shares,
    next_device: Callable[[], str],
    column_multiple: int,
    *,
    outer: bool,
) -> tuple[Shard, ...]:
    each = [
        (
            _cut(kind.mixer.num_units, shares.heads),
            _cut(kind.feed_forward.columns, shares.ffn_columns, column_multiple),
        )
        for kind in spec.kinds
    ]
    vocab = _cut(spec.vocab_size if outer else 0, shares.vocab)
    return tuple(
        Shard.of_slices(
            next_device(),
            slices(*((heads[i], columns[i]) for heads, columns in each)),
            vocab=vocab[i],
        )
        for i in range(len(vocab))
    )


def _cut(total: int, weights: Sequence[int], multiple: int = 1) -> tuple[range, ...]:
    """0..total in consecutive ranges by weight, cut on multiples; the last weight has the rest."""
    whole = sum(weights)
    cuts = [
        total if reached == whole else total * reached // (whole * multiple) * multiple
        for reached in itertools.accumulate(weights, initial=0)
    ]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(cuts))


def solo_assignment(
    spec: ModelSpec, limits: StepLimits, wire_rules: WireRules, *, layout: str = "solo"
) -> Assignment:
    """All of a model, alone; or its first shard in another layout."""
    return Assignment(
        session="s",
        model=spec,
        plan=make_plan(spec, layout, model="m"),
        stage=0,
        rank=0,
        weight_format=uniform_format("int4"),
        manifest_digest="d",
        weights_digest="w",
        kv_dtype="float32",
        limits=limits,
        wire_rules=wire_rules,
    )
