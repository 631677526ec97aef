"""Losses one can picture: who takes what, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.partition import (
    CapacityError,
    ClusterSpec,
    LayerSlice,
    LinkSpec,
    ModelFacts,
    Plan,
    PlanError,
    Shard,
    Stage,
    Workload,
    describe_plan_in_words,
    memory_use,
    repair,
    whole_shard,
)
from edge.partition.cost.message_times import NO_LINK_S
from edge.partition.losses.stand_ins import all_seats_taken, some_seats_taken
from tests.unit.partition.test_choose import CABLE, LARGE, SMALL, cluster

SHORT = Workload(prompt_tokens=100, output_tokens=100)
FAST = 30e9


def unmeasured(count: int) -> ClusterSpec:
    """Devices a, b, c, ... of 4 GiB each."""
    known = cluster(*[(4, FAST)] * count)
    return ClusterSpec(devices=tuple(replace(device, rates=None) for device in known.devices))


def pipeline(model: ModelFacts, *layers: range) -> Plan:
    """A stage for each run of layers, on devices 00, 01, ..."""
    outer = (0, len(layers) - 1)
    return Plan(
        model=model.name,
        version=3,
        stages=tuple(
            Stage(
                layers=each,
                shards=(
                    whole_shard(
                        f"{number:02}",
                        model,
                        vocab=range(model.vocab_size if number in outer else 0),
                    ),
                ),
            )
            for number, each in enumerate(layers)
        ),
    )


def tensor(model: ModelFacts, *heads: range) -> Plan:
    """One stage, columns and rows in proportion to the heads, on devices 00, 01, ..."""
    (layer,) = model.kinds

    def part(own: range, total: int) -> range:
        return range(
            own.start * total // layer.num_heads // 32 * 32,
            own.stop * total // layer.num_heads // 32 * 32,
        )

    shards = tuple(
        Shard.of_slices(
            f"{number:02}",
            [LayerSlice(heads=own, ffn_columns=part(own, layer.ffn_columns))],
            vocab=part(own, model.vocab_size),
        )
        for number, own in enumerate(heads)
    )
    return Plan(
        model=model.name,
        version=3,
        stages=(Stage(layers=range(model.num_layers), shards=shards),),
    )


THREE_STAGES = pipeline(SMALL, range(8), range(8, 15), range(15, 22))
FOUR_RANKS = tensor(SMALL, range(8), range(8, 16), range(16, 24), range(24, 32))


def test_a_device_without_a_seat_changes_nothing() -> None:
    devices = cluster(*[(4, FAST)] * 4)
    repaired = repair(THREE_STAGES, SMALL, devices, {"03"}, SHORT)
    assert (repaired.plan, repaired.method) == (THREE_STAGES, "unchanged")
    assert repaired.same_shape
    assert repaired.kept == ("00", "01", "02")
    assert repaired.moved_bytes == 0


def test_a_stand_in_that_has_the_shard_cached_is_taken_first() -> None:
    devices = cluster(*[(4, FAST)] * 5)
    repaired = repair(THREE_STAGES, SMALL, devices, {"01"}, SHORT, cached={"04": [(1, 0)]})
    assert repaired.plan.devices == ("00", "04", "02")
    assert repaired.plan.version == 4
    assert repaired.same_shape
    assert repaired.kept == ("00", "02")
    assert repaired.moved_bytes == 0
    assert repaired.ready_s > 0  # it is on its disk, and has to be loaded


@pytest.mark.parametrize(("slower", "same_shape"), [(1.5, True), (20.0, False)])
def test_the_same_bits_are_worth_twice_the_time(slower: float, same_shape: bool) -> None:
    devices = cluster(*[(4, FAST)] * 3, (4, FAST / slower), link=CABLE)
    long = Workload(prompt_tokens=100, output_tokens=3000)
    sent = {device.id: 1e12 for device in devices.devices}
    repaired = repair(
        THREE_STAGES,
        SMALL,
        devices,
        {"01"},
        long,
        send_bytes_per_s=sent,
        parallel="pipeline",
        keeps_shape=True,
        may_double=False,
    )
    assert repaired.same_sums
    assert repaired.same_shape is same_shape
    assert ("03" in repaired.plan.devices) is same_shape


def test_a_plan_by_hand_is_not_planned_anew_while_something_like_it_fits() -> None:
    devices = cluster(*[(4, FAST)] * 3, link=CABLE)
    long = Workload(prompt_tokens=100, output_tokens=3000)
    plan = tensor(SMALL, range(2), range(2, 30), range(30, 32))
    anew = repair(plan, SMALL, devices, {"01"}, long, may_double=False)
    assert anew.method == "planned"
    like_it = repair(plan, SMALL, devices, {"01"}, long, parallel=None, may_double=False)
    assert like_it.method == "grown"


def test_stand_ins_that_would_read_from_disk_hide_none_that_has_the_room() -> None:
    devices = cluster(*[(4, FAST)] * 3, *[(0.1, FAST)] * 6, (4, FAST))
    repaired = repair(
        THREE_STAGES, SMALL, devices, {"01"}, SHORT, stream=True, keeps_shape=True, may_double=False
    )
    assert repaired.plan.devices == ("00", "09", "02")
    assert repaired.same_shape


def test_of_stand_ins_the_one_that_is_done_first_is_taken() -> None:
    devices = cluster(*[(4, FAST)] * 5)
    sent = {"03": 10e6, "04": 100e6}
    repaired = repair(
        THREE_STAGES,
        SMALL,
        devices,
        {"02"},
        SHORT,
        send_bytes_per_s=sent,
        keeps_shape=True,
        may_double=False,
    )
    assert repaired.plan.devices == ("00", "01", "04")


def test_a_stand_in_that_cannot_reach_the_others_is_none() -> None:
    devices = unmeasured(4)
    assert repair(THREE_STAGES, SMALL, devices, {"01"}, SHORT, keeps_shape=True).same_shape
    apart = LinkSpec(source="03", target="02", latency_s=NO_LINK_S, bytes_per_s=1.0)
    devices = replace(devices, links=(apart,))
    repaired = repair(THREE_STAGES, SMALL, devices, {"01"}, SHORT, keeps_shape=True)
    assert repaired.method == "doubled"
    repaired = repair(
        THREE_STAGES, SMALL, devices, {"01"}, SHORT, keeps_shape=True, may_double=False
    )
    assert not repaired.same_shape


def test_the_layers_of_a_lost_stage_go_to_both_its_neighbours() -> None:
    left = unmeasured(3)
    repaired = repair(THREE_STAGES, SMALL, left, {"01"}, SHORT)
    assert describe_plan_in_words(repaired.plan, left) == "a: layers 0-10 | c: layers 11-21"
    layer_bytes = SMALL.kinds[0].weight_bytes
    assert repaired.lacking_bytes == {"00": 3 * layer_bytes, "02": 4 * layer_bytes}
    assert (repaired.method, repaired.same_shape) == ("grown", False)
    assert repaired.predicted is None


def test_who_becomes_the_first_stage_gets_the_embedding() -> None:
    left = unmeasured(3)
    repaired = repair(THREE_STAGES, SMALL, left, {"00"}, SHORT)
    assert describe_plan_in_words(repaired.plan, left) == "b: layers 0-14 | c: layers 15-21"
    embedding_bytes = SMALL.vocab_size * SMALL.embedding_row_bytes
    assert repaired.lacking_bytes["01"] == 8 * SMALL.kinds[0].weight_bytes + embedding_bytes
    assert repaired.kept == ("02",)


def test_the_slices_of_a_lost_rank_go_to_the_ranks_beside_it() -> None:
    left = cluster(*[(4, FAST)] * 4, link=CABLE)
    repaired = repair(FOUR_RANKS, SMALL, left, {"01"}, SHORT, parallel=None, may_double=False)
    assert [(shard.device, shard.heads) for shard in repaired.plan.stages[0].slices] == [
        ("00", range(12)),
        ("02", range(12, 24)),
        ("03", range(24, 32)),
    ]
    assert repaired.kept == ("03",)


def test_a_rank_may_take_the_seat_of_another_so_that_sums_stay_as_they_are() -> None:
    left = cluster(*[(4, FAST)] * 4, link=CABLE)
    repaired = repair(FOUR_RANKS, SMALL, left, {"01"}, SHORT)
    assert (repaired.method, repaired.same_shape, repaired.same_sums) == ("doubled", True, True)
    (stage,) = repaired.plan.stages
    devices = [shard.device for shard in stage.slices]
    assert len(set(devices)) == 3
    assert devices[1] in devices[:1] + devices[2:]
    assert repaired.predicted is not None
    both = memory_use(repaired.plan, SMALL, SHORT)[devices[1]].total
    tight = cluster(*[(both / (1 << 30), FAST)] * 4, link=CABLE)
    assert repair(FOUR_RANKS, SMALL, tight, {"01"}, SHORT).method == "doubled"
    less = repair(FOUR_RANKS, SMALL, tight, {"01"}, SHORT, further_seat_bytes=1)
    assert less.method != "doubled"
    again = repair(repaired.plan, SMALL, left, {devices[1]}, SHORT)
    assert again.same_sums
    assert set(again.plan.devices) == {"00", "02", "03"} - {devices[1]}


def test_the_last_rank_of_a_stage_becomes_whole() -> None:
    left = unmeasured(4)
    repaired = repair(FOUR_RANKS, SMALL, left, {"00", "01", "03"}, SHORT, may_double=False)
    (shard,) = repaired.plan.stages[0].slices
    assert shard == whole_shard("02", SMALL, vocab=range(SMALL.vocab_size))
    assert repaired.lacking_bytes["02"] < memory_use(repaired.plan, SMALL, SHORT)["02"].weight_bytes


def test_some_seats_are_taken_and_others_closed() -> None:
    left = unmeasured(4)
    plan = pipeline(SMALL, range(8), range(8, 15), range(15, 22))
    repaired = repair(plan, SMALL, left, {"01", "02"}, SHORT, cached={"03": [(2, 0)]})
    assert repaired.plan.devices == ("00", "03")
    assert repaired.plan.stages[1].layers.stop == 22
    assert repaired.moved_bytes == 7 * SMALL.kinds[0].weight_bytes


def test_where_nothing_fits_it_is_said_what_is_missing_on_whom() -> None:
    layers = LARGE.num_layers
    plan = pipeline(LARGE, range(layers // 2), range(layers // 2, layers))
    left = cluster((30, FAST), (30, FAST))
    with pytest.raises(CapacityError, match=r"'a' lacks .* GiB") as refused:
        repair(plan, LARGE, left, {"01"}, SHORT)
    assert refused.value.device == "00"
    repaired = repair(plan, LARGE, left, {"01"}, SHORT, stream=True)
    assert repaired.plan.devices == ("00",)
    assert repaired.plan.stages[0].slices[0].streamed_layers > 0
    assert repaired.predicted is not None


def test_nobody_is_left_and_a_plan_that_is_none_of_the_model() -> None:
    with pytest.raises(PlanError, match="no devices"):
        repair(THREE_STAGES, SMALL, cluster(*[(4, FAST)] * 3), {"00", "01", "02"}, SHORT)
    with pytest.raises(PlanError, match="the model has 80"):
        repair(THREE_STAGES, LARGE, ClusterSpec(devices=()), {"00"}, SHORT)


def test_many_seats_are_filled_or_found_to_be_too_many_at_once() -> None:
    crowd = [f"d{number:02}" for number in range(30)]
    assert all_seats_taken([crowd] * 30 + [crowd], most=4) == []
    assert len(all_seats_taken([crowd] * 30, most=4)) == 4
    assert all_seats_taken([["a", "b"], ["a"]], most=9) == [("b", "a")]
    assert list(some_seats_taken([["a", "b"], ["a"]], most=9)) == [
        ("a", None),
        ("b", None),
        (None, "a"),
        (None, None),
    ]
