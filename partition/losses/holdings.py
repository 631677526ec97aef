"""The weights that devices have, and the bytes of a share that they lack. Counts; decides
nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edge.partition.plan.facts import LayerFacts, ModelFacts
from edge.partition.plan.plan import Plan
from edge.partition.plan.ranges import kv_heads
from edge.partition.plan.shard import LayerSlice, Shard

Seat = tuple[int, int]
"""A place in a plan: its stage and its rank there, both from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The weights of one seat."""

    layers: range
    shard: Shard
    has_embedding: bool
    has_head: bool

    def is_like(self, other: "Holding") -> bool:
        """Whether the two have the same weights; their devices may differ."""
        return self == Holding(
            layers=other.layers,
            shard=other.shard.on(self.shard.device),
            has_embedding=other.has_embedding,
            has_head=other.has_head,
        )


def seats_of(plan: Plan) -> dict[Seat, Holding]:
    """The weights of each seat, in plan order."""
    last = len(plan.stages) - 1
    return {
        (number, rank): Holding(
            layers=stage.layers,
            shard=shard,
            has_embedding=number == 0,
            has_head=number == last,
        )
        for number, stage in enumerate(plan.stages)
        for rank, shard in enumerate(stage.slices)
    }


def lacking_bytes(wanted: Holding, held: Sequence[Holding], model: ModelFacts) -> int:
    """Bytes of `wanted` that are in none of `held`.

    Heads, feed-forward columns, norms and vocabulary rows count separately. A KV head that a shard
    holds more than once counts once, because the device can copy it.
    """
    return sum(_layer_bytes(wanted, held, model)) + _row_bytes(wanted, held, model)


def _row_bytes(wanted: Holding, held: Sequence[Holding], model: ModelFacts) -> int:
    rows, total = wanted.shard.vocab, 0
    if wanted.has_embedding:
        known = [each.shard.vocab for each in held if each.has_embedding]
        total += uncovered(rows, known) * model.embedding_row_bytes
    if wanted.has_head:
        known = [each.shard.vocab for each in held if each.has_head]
        total += uncovered(rows, known) * model.head_row_bytes
    return total


def _layer_bytes(wanted: Holding, held: Sequence[Holding], model: ModelFacts) -> Iterator[int]:
    """Bytes that are lacking, for each run of layers held by the same holdings."""
    edges = {
        min(max(edge, wanted.layers.start), wanted.layers.stop)
        for each in (wanted, *held)
        for edge in (each.layers.start, each.layers.stop)
    }
    for start, stop in pairwise(sorted(edges)):
        there = [h for h in held if h.layers.start <= start and stop <= h.layers.stop]
        are_whole = any(each.shard.experts for each in (wanted, *there))
        for kind, (facts, count) in enumerate(model.count(range(start, stop))):
            if count:
                slices = [each.shard.slice(kind) for each in there]
                columns_bytes = facts.shared_column_bytes if are_whole else facts.ffn_column_bytes
                own = wanted.shard.slice(kind)
                yield count * _slice_bytes(own, slices, facts, columns_bytes)
        if are_whole:
            for layer in range(start, stop):
                yield _expert_bytes(wanted, there, layer, model)


def _expert_bytes(wanted: Holding, held: Sequence[Holding], layer: int, model: ModelFacts) -> int:
    """Bytes that are lacking of one layer's experts, where some are held whole."""
    kind = model.layers[layer]
    facts = model.kinds[kind]
    if not facts.num_experts:
        return 0

    def own(of: Holding) -> tuple[int, ...]:
        return of.shard.experts[layer - of.layers.start]

    whole = {number for each in held if each.shard.experts for number in own(each)}
    cut = [each.shard.slice(kind).ffn_columns for each in held if not each.shard.experts]
    columns = range(facts.ffn_columns)
    numbers: Sequence[int] = range(facts.num_experts)
    if wanted.shard.experts:
        numbers = own(wanted)
    else:
        columns = wanted.shard.slice(kind).ffn_columns
    lacking = uncovered(columns, cut) * sum(number not in whole for number in numbers)
    return lacking * facts.expert_column_bytes


def _slice_bytes(
    wanted: LayerSlice, held: Sequence[LayerSlice], facts: LayerFacts, column_bytes: int
) -> int:
    """Bytes that are lacking of one layer."""
    known = {head for each in held for head in _kv_heads(each, facts)}
    columns = uncovered(wanted.ffn_columns, [each.ffn_columns for each in held])
    return (
        uncovered(wanted.heads, [each.heads for each in held]) * facts.query_head_bytes
        + len(set(_kv_heads(wanted, facts)) - known) * facts.kv_head_bytes
        + columns * column_bytes
        + (0 if held else facts.layer_bytes)
    )


def _kv_heads(part: LayerSlice, facts: LayerFacts) -> tuple[int, ...]:
    return kv_heads(part.heads, facts.num_heads, facts.num_kv_heads)


def uncovered(wanted: range, held: Sequence[range]) -> int:
    """The number of elements of `wanted` in none of `held`; all ranges have step 1."""
    missing, reached = 0, wanted.start
    for each in sorted(held, key=lambda one: one.start):
        missing += max(0, min(each.start, wanted.stop) - reached)
        reached = max(reached, min(each.stop, wanted.stop))
    return missing + max(0, wanted.stop - reached)
