"""A lower bound of the time of layers on a group of devices, quickly computed.

As in `stage_options`, but memory limits nothing except the number of layers, KV heads are never
held twice, and each kind of step has shares of its own. The bound depends on the set of devices and
on which one is rank 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge.partition.cost.estimate import gather_latency_s
from edge.partition.cost.pace import Pace
from edge.partition.plan.facts import LayerFacts
from edge.partition.search.balance import Cost, least_maximum
from edge.partition.search.group_splits import column_costs, row_costs
from edge.partition.search.situation import Situation, StageKey

_GOLDEN = (math.sqrt(5) - 1) / 2

_SECTIONS = 32
"""Steps of a golden section search; 0.618^32 is 2e-7 of the first interval."""

_SECTION_ERROR = 1 - 1e-5
"""Keeps the result a lower bound, though the search ends a little before the minimum."""


@dataclass(frozen=True, slots=True)
class StageBound:
    """A lower bound of a stage's seconds, linear in the size of its layers (`Situation.sizes`)."""

    base_s: float
    """Seconds of a whole answer without its layers: every decoding step, and one chunk."""
    layer_s: float
    chunk_base_s: float
    """Seconds of one chunk without its layers."""
    chunk_layer_s: float
    most: int
    """The summed size of layers that the devices have room for together; 0 when not even for
    one."""


def stage_bound(situation: Situation, stage: StageKey) -> StageBound:
    """The group has rank 0 first; the order of the others makes no difference."""
    lines: list[tuple[float, float]] = []
    for is_chunk in (False, True):
        paces = situation.paces(stage.group, is_chunk=is_chunk, crowded=stage.crowded)
        if len(stage.group) == 1:
            lines.append(_alone(situation, paces[0], stage.is_last))
        else:
            lines.append(_together(situation, stage, paces, is_chunk))
    (base_s, layer_s), (chunk_base_s, chunk_layer_s) = lines
    return StageBound(
        base_s=situation.steps * base_s + chunk_base_s,
        layer_s=situation.steps * layer_s + chunk_layer_s,
        chunk_base_s=chunk_base_s,
        chunk_layer_s=chunk_layer_s,
        most=_most(situation, stage),
    )


def _alone(situation: Situation, pace: Pace, is_last: bool) -> tuple[float, float]:
    model = situation.model
    base_s = pace.whole(model, (), model.vocab_size if is_last else 0).total_s
    bare_s = pace.whole(model, (), 0).total_s
    layer_s = min(
        (pace.whole(model, ((shape, 1),), 0).total_s - bare_s) / size
        for shape, size in zip(situation.shapes, situation.sizes, strict=True)
    )
    return base_s + pace.step_s, layer_s


def _together(
    situation: Situation, stage: StageKey, paces: Sequence[Pace], is_chunk: bool
) -> tuple[float, float]:
    model = situation.model
    sum_s = situation.sum_s(stage.group, is_chunk=is_chunk)
    bare_s = max(pace.bare().total_s for pace in paces)
    base_s = max(pace.step_s for pace in paces)
    base_s += stage.is_first * (sum_s + bare_s)
    if stage.is_last:
        base_s += gather_latency_s(situation.network, situation.ids(stage.group))
        base_s += _least_s(model.vocab_size, row_costs(model, paces))
    else:
        base_s += bare_s
    layer_s = min(
        (_layer_s(shape, paces, model.column_multiple) + 2 * sum_s) / size
        for shape, size in zip(situation.shapes, situation.sizes, strict=True)
    )
    return base_s, layer_s


def _layer_s(layer: LayerFacts, paces: Sequence[Pace], column_multiple: int) -> float:
    kv_part = layer.num_kv_heads / layer.num_heads
    head_bytes = layer.query_head_bytes + kv_part * layer.kv_head_bytes
    # Heads are few, so they are counted whole; columns and rows are many.
    heads_s = _least_whole_s(
        layer.num_heads,
        [
            Cost(
                pace.attention_from(layer).total_s,
                (head_bytes * pace.weight_s + pace.head_s(layer)) * pace.slack,
                pace.attention(layer, 0, 0).total_s,
            )
            for pace in paces
        ],
    )
    columns = column_costs(layer, column_multiple, paces, [0] * len(paces))
    return heads_s + _least_s(layer.ffn_columns // column_multiple, columns)


def _least_whole_s(total: int, costs: Sequence[Cost]) -> float:
    counts = least_maximum(total, costs, [total] * len(costs), [0] * len(costs))
    assert counts is not None
    return max(cost.of(count) for cost, count in zip(costs, counts, strict=True))


def _least_s(total: float, costs: Sequence[Cost]) -> float:
    """The least largest cost if pieces may be divided.

    At a time t, device i has (t - base_i) / each_i pieces. Devices join when t passes their bases,
    and none is done before its time without pieces.
    """
    floor_s = max(cost.idle_s for cost in costs)
    speed = done = 0.0
    least_s = math.inf
    for cost in sorted(costs, key=lambda one: one.base_s):
        if cost.base_s >= least_s:
            break
        if not cost.each_s:
            least_s = cost.base_s
            break
        speed += 1 / cost.each_s
        done += cost.base_s / cost.each_s
        least_s = (total + done) / speed
    return max(floor_s, least_s)


def _most(situation: Situation, stage: StageKey) -> int:
    """The most that fits, as if all layers had the shape with the fewest bytes for its size."""
    room = sum(situation.devices[index].memory_bytes for index in stage.group)
    room -= situation.model.vocab_size * situation.row_bytes(stage)
    if room < 0:
        return 0
    most = 0
    for shape, size in zip(situation.shapes, situation.sizes, strict=True):
        layer_bytes = shape.weight_bytes + (len(stage.group) - 1) * shape.layer_bytes
        layer_bytes += shape.num_kv_heads * shape.kept_bytes(situation.workload)
        if not layer_bytes:
            return situation.reached_size[-1]
        most = max(most, room * size // layer_bytes)
    return min(situation.reached_size[-1], most)


def layers_bound_s(
    bounds: Sequence[StageBound], whole: int, smallest: int, more_chunks: int
) -> float:
    """Seconds that no way of giving the layers to these stages can beat, one or more to each.

    whole: the size of all layers; smallest: of the smallest.

    Layers count as divisible. When the slowest stage may take t for a chunk, the layers go to the
    stages where they cost least, as far as t lets them: the sum of that and `more_chunks` x t is
    convex in t, so its least value is found by golden section.
    """
    ordered = sorted(bounds, key=lambda bound: bound.layer_s)
    least_s = sum(bound.base_s + smallest * bound.layer_s for bound in ordered)

    def total_s(slowest_s: float) -> float:
        left = float(whole - smallest * len(ordered))
        total_s = least_s + more_chunks * slowest_s
        for bound in ordered:
            most = float(bound.most - smallest)
            room_s = slowest_s - bound.chunk_base_s - smallest * bound.chunk_layer_s
            if bound.chunk_layer_s:
                most = min(most, room_s / bound.chunk_layer_s)
            taken = min(left, most)
            left -= taken
            total_s += taken * bound.layer_s
        return total_s if left <= 1e-9 * whole else math.inf

    low_s = max(bound.chunk_base_s + smallest * bound.chunk_layer_s for bound in ordered)
    high_s = max(bound.chunk_base_s + bound.most * bound.chunk_layer_s for bound in ordered)
    if not more_chunks:
        return total_s(high_s)
    left_s, right_s = high_s - _GOLDEN * (high_s - low_s), low_s + _GOLDEN * (high_s - low_s)
    left, right = total_s(left_s), total_s(right_s)
    best = min(total_s(low_s), total_s(high_s), left, right)
    for _ in range(_SECTIONS):
        if left >= right:
            low_s, left_s, left = left_s, right_s, right
            right_s = low_s + _GOLDEN * (high_s - low_s)
            right = total_s(right_s)
        else:
            high_s, right_s, right = right_s, left_s, left
            left_s = high_s - _GOLDEN * (high_s - low_s)
            left = total_s(left_s)
        best = min(best, left, right)
    return best * _SECTION_ERROR
