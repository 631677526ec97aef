"""What holds for every repair: valid, of living devices, and what it says of itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    LayerSlice,
    ModelFacts,
    PartitionError,
    Plan,
    PlanError,
    Repair,
    Seat,
    Shard,
    Stage,
    Workload,
    can_repair,
    check_fit,
    choose,
    memory_use,
    repair,
)
from edge.partition.losses.closing import Closer
from tests.property.measured_situations import rates
from tests.property.plan_situations import models, whole_bytes, workloads
from tests.property.test_plans_unlike import unlike_models

Pieces = Mapping[tuple[object, ...], int]
"""Bytes of each piece of weights, by what it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    plan: Plan
    model: ModelFacts
    cluster: ClusterSpec
    lost: frozenset[str]
    workload: Workload
    cached: Mapping[str, list[Seat]]
    send_bytes_per_s: Mapping[str, float]
    stream: bool

    def repair(self) -> Repair:
        return repair(
            self.plan,
            self.model,
            self.cluster,
            self.lost,
            self.workload,
            cached=self.cached,
            send_bytes_per_s=self.send_bytes_per_s,
            stream=self.stream,
        )

    def can_repair(self) -> bool:
        return can_repair(
            self.plan, self.model, self.cluster, self.lost, self.workload, stream=self.stream
        )


@st.composite
def cut(draw: st.DrawFn, total: int, parts: int, multiple: int = 1, least: int = 0) -> list[range]:
    """0..total in so many ranges, in order, each of `least` multiples."""
    units = max(0, total // multiple - parts * least)
    inner = sorted(draw(st.integers(0, units)) for _ in range(parts - 1))
    edges = [0, *((each + least * n) * multiple for n, each in enumerate(inner, 1)), total]
    return [range(start, stop) for start, stop in pairwise(edges)]


@st.composite
def plans(draw: st.DrawFn, model: ModelFacts) -> Plan:
    """Of any shape, on at most five devices d0, d1, ..."""
    stages: list[Stage] = []
    count = draw(st.integers(1, min(3, model.num_layers)))
    used, most = 0, 5
    for number, layers in enumerate(draw(cut(model.num_layers, count, least=1))):
        ranks = draw(st.integers(1, min(3, most - used - (count - number - 1))))
        is_outer = number in (0, count - 1)
        vocab = draw(cut(model.vocab_size if is_outer else 0, ranks, least=int(is_outer)))
        kinds = [
            zip(
                draw(cut(kind.num_heads, ranks)),
                draw(cut(kind.ffn_columns, ranks, model.column_multiple)),
                strict=True,
            )
            for kind in model.kinds
        ]
        slices = zip(*kinds, strict=True)
        shards = tuple(
            Shard.of_slices(
                f"d{used + rank}",
                [LayerSlice(heads=heads, ffn_columns=columns) for heads, columns in own],
                vocab=vocab[rank],
            )
            for rank, own in enumerate(slices)
        )
        used += ranks
        stages.append(Stage(layers=layers, shards=shards))
    return Plan(model=model.name, version=draw(st.integers(0, 9)), stages=tuple(stages))


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    model = draw(st.one_of(models(most_layers=6), unlike_models()))
    plan, workload = draw(plans(model)), draw(workloads)
    try:
        use = memory_use(plan, model, workload)
    except PlanError:  # a rank between with nothing to do
        assume(False)
        raise
    whole = whole_bytes(model, workload)
    spare = [f"s{number}" for number in range(draw(st.integers(0, 2)))]
    known = draw(st.sampled_from((st.just(True), st.just(False), st.booleans())))
    devices = tuple(
        DeviceSpec(
            id=id,
            name=f"name of {id}",
            memory_bytes=(use[id].total if id in use else 0)
            + whole * draw(st.sampled_from((0, 10, 40, 120))) // 100,
            threads=draw(st.integers(1, 8)),
            rates=draw(rates()) if draw(known) else None,
        )
        for id in draw(st.permutations([*plan.devices, *spare]))
    )
    seats = [(n, rank) for n, stage in enumerate(plan.stages) for rank in range(len(stage.shards))]
    ids = [device.id for device in devices]
    return Loss(
        plan=plan,
        model=model,
        cluster=ClusterSpec(devices=devices),
        lost=frozenset(draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3))),
        workload=workload,
        cached={id: draw(st.lists(st.sampled_from(seats), max_size=2)) for id in spare},
        send_bytes_per_s={id: 1e6 for id in ids if draw(st.booleans())},
        stream=draw(st.booleans()),
    )


def pieces(stage: Stage, shard: Shard, number: int, plan: Plan, model: ModelFacts) -> Pieces:
    """Piece by piece what one seat holds."""
    found: dict[tuple[object, ...], int] = {}
    for layer in stage.layers:
        kind = model.layers[layer]
        facts, part = model.kinds[kind], shard.slice(kind)
        group = facts.num_heads // facts.num_kv_heads
        found[layer, "norms"] = facts.layer_bytes
        for head in part.heads:
            found[layer, "head", head] = facts.query_head_bytes
            found[layer, "kv", head // group] = facts.kv_head_bytes
        for column in part.ffn_columns:
            found[layer, "column", column] = facts.ffn_column_bytes
    for row in shard.vocab:
        if number == 0:
            found["embedding", row] = model.embedding_row_bytes
        if number == len(plan.stages) - 1:
            found["head", row] = model.head_row_bytes
    return found


def seated(plan: Plan, model: ModelFacts) -> dict[Seat, tuple[str, Pieces]]:
    return {
        (number, rank): (shard.device, pieces(stage, shard, number, plan, model))
        for number, stage in enumerate(plan.stages)
        for rank, shard in enumerate(stage.slices)
    }


def by_device(seats: Mapping[Seat, tuple[str, Pieces]]) -> dict[str, Pieces]:
    found: dict[str, Pieces] = {}
    for id, own in seats.values():
        found[id] = {**found.get(id, {}), **own}
    return found


def cuts(plan: Plan, model: ModelFacts) -> list[object]:
    """How each layer is cut, whatever stage it is in."""
    return [
        [each.slice(model.layers[layer]) for each in stage.slices]
        for stage in plan.stages
        for layer in stage.layers
    ]


def shape(plan: Plan) -> list[object]:
    return [(stage.layers, [shard.on("anyone") for shard in stage.shards]) for stage in plan.stages]


@settings(max_examples=25)
@given(losses())
def test_a_repair_fits_and_is_what_it_says(loss: Loss) -> None:
    left = loss.cluster.without(*loss.lost)
    try:
        repaired = loss.repair()
    except PartitionError:
        assert not loss.can_repair()
        with pytest.raises(CapacityError if left.devices else PlanError):
            choose(loss.model, left, loss.workload, stream=loss.stream)
        return
    assert loss.can_repair()
    plan, model = repaired.plan, loss.model
    if not loss.lost & set(loss.plan.devices):
        assert (repaired.method, plan) == ("unchanged", loss.plan)
    else:
        assert plan.version == loss.plan.version + 1
    check_fit(plan, model, left, loss.workload, is_repaired=repaired.method == "doubled")
    assert not loss.lost & set(plan.devices)
    assert repaired.same_shape == (shape(plan) == shape(loss.plan))
    assert repaired.same_sums == (cuts(plan, model) == cuts(loss.plan, model))
    assert (repaired.predicted is not None) == all(left.device(id).rates for id in plan.devices)

    before, after = seated(loss.plan, model), seated(plan, model)
    had, has = by_device(before), by_device(after)
    for id, own in has.items():
        known = {**had.get(id, {})}
        for seat in loss.cached.get(id, ()):
            known |= before[seat][1]
        lacking = sum(nbytes for piece, nbytes in own.items() if piece not in known)
        if repaired.method == "doubled":  # what two seats have in common counts for each
            assert repaired.lacking_bytes[id] >= lacking
        else:
            assert repaired.lacking_bytes[id] == lacking
        if repaired.method != "planned" and id in had:
            assert had[id].keys() <= own.keys()
    for id in repaired.kept:
        assert had[id] == has[id]
    assert repaired == loss.repair()


@settings(max_examples=20)
@given(losses(), st.data())
def test_a_stand_in_with_room_keeps_the_shape_while_nothing_was_measured(
    loss: Loss, data: st.DataObject
) -> None:
    gone = [id for id in loss.plan.devices if id in loss.lost]
    use = memory_use(loss.plan, loss.model, loss.workload)
    room = max(use[id].total for id in loss.plan.devices)
    devices = [
        dataclasses.replace(
            device, rates=None, memory_bytes=max(device.memory_bytes, use[device.id].total)
        )
        for device in loss.cluster.devices
        if device.id in use
    ]
    devices += [
        DeviceSpec(id=f"new {number}", name="new", memory_bytes=room, threads=1)
        for number in range(len(gone))
    ]
    cluster = ClusterSpec(devices=tuple(data.draw(st.permutations(devices))))
    repaired = repair(loss.plan, loss.model, cluster, loss.lost, loss.workload, keeps_shape=True)
    assert repaired.same_shape
    assert Counter(repaired.kept) == Counter(id for id in loss.plan.devices if id not in gone)


@settings(max_examples=20)
@given(losses())
def test_whoever_grows_makes_a_whole_plan(loss: Loss) -> None:
    seats = [
        [None if shard.device in loss.lost else shard for shard in stage.slices]
        for stage in loss.plan.stages
    ]
    closer = Closer(
        plan=loss.plan,
        model=loss.model,
        devices={device.id: device for device in loss.cluster.devices},
        workload=loss.workload,
    )
    ways = list(closer.ways(seats, most=9))
    assert bool(ways) == any(shard is not None for shards in seats for shard in shards)
    for way in ways:
        way.validate(loss.model, loss.cluster.without(*loss.lost))
