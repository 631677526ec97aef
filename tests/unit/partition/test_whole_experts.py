"""Experts as wholes on different devices: their plans, memory and time, and who has which."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    Estimate,
    ModelFacts,
    Plan,
    PlanError,
    Shard,
    Stage,
    Workload,
    describe,
    estimate,
    memory_use,
    repair,
    with_whole_experts,
)
from edge.partition.cost.expert_load import chances, expected_slowest
from edge.partition.fit.streamed_layers import streaming
from edge.partition.losses.holdings import lacking_bytes, seats_of
from edge.partition.losses.repair import _cuts
from edge.partition.plan.expert_tiers import LayerBytes, expert_bytes, expert_tiers, read_bytes
from edge.partition.search.whole_experts import _by_rank, _Device, _exchanged
from tests.support.facts import changed_facts
from tests.unit.partition.test_plan_cost import MODEL as DENSE
from tests.unit.partition.test_plan_cost import RATES, cluster, shard

NUM_EXPERTS, TOP_K, LAYERS = 6, 2, 3
COLUMNS, EXPERT_COLUMN_BYTES, SHARED_COLUMN_BYTES = 8, 100, 4
EXPERT_BYTES = COLUMNS * EXPERT_COLUMN_BYTES
WORKLOAD = Workload(prompt_tokens=1, output_tokens=10)

MODEL = changed_facts(
    DENSE,
    ffn_column_bytes=NUM_EXPERTS * EXPERT_COLUMN_BYTES + SHARED_COLUMN_BYTES,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    expert_column_bytes=EXPERT_COLUMN_BYTES,
)
FIRST, SECOND = (0, 2, 5), (1, 3, 4)


def plan(*experts: tuple[int, ...], model: ModelFacts = MODEL) -> Plan:
    """One stage of two shards, with the same experts in each layer; none: cut by columns."""
    shards: tuple[Shard, ...] = (
        shard("a", range(2), range(4), range(5)),
        shard("b", range(2, 4), range(4, 8), range(5, 10)),
    )
    if experts:
        shards = tuple(
            each.with_experts((own,) * model.num_layers)
            for each, own in zip(shards, experts, strict=True)
        )
    return Plan(model="m", version=0, stages=(Stage(layers=range(LAYERS), shards=shards),))


def uses(*each: float) -> tuple[tuple[float, ...], ...]:
    return (each,) * LAYERS


def seconds_of_steps(found: Plan, model: ModelFacts, devices: ClusterSpec) -> Estimate:
    return estimate(found, model, devices, WORKLOAD)


def test_a_plan_with_them_is_written_and_read() -> None:
    whole = plan(FIRST, SECOND)
    assert Plan.from_json(whole.to_json()) == whole
    whole.validate(MODEL, None)
    assert "experts" not in plan().to_json()["stages"][0]["shards"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (((0, 2), SECOND), "not each of the 6 experts of layer 0 once"),
        (((0, 1, 2), SECOND), "not each of the 6 experts of layer 0 once"),
        (((2, 0, 5), SECOND), "twice, or not in order"),
        (((0, 0, 2, 5), SECOND), "twice, or not in order"),
        (((0, 2, 6), SECOND), "not each of the 6 experts of layer 0 once"),
        ((FIRST, ()), "0 whole experts of layer 0, and must have as many"),
    ],
)
def test_each_expert_is_on_one_device(experts: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        plan(*experts).validate(MODEL, None)


def test_a_device_has_as_many_of_each_layer() -> None:
    found = plan(FIRST, SECOND)
    (stage,) = found.stages
    one, other = stage.slices
    uneven = (
        one.with_experts((FIRST, FIRST, (0,))),
        other.with_experts((SECOND, SECOND, (1, 2, 3, 4, 5))),
    )
    with pytest.raises(PlanError, match="has 1 whole experts of layer 2, and must have as many"):
        replace(found, stages=(replace(stage, shards=uneven),)).validate(MODEL, None)
    few = one.with_experts((FIRST,)), other.with_experts((SECOND,) * LAYERS)
    with pytest.raises(PlanError, match="names experts of 1 layers, and the stage has 3"):
        replace(found, stages=(replace(stage, shards=few),)).validate(MODEL, None)


def test_where_they_are_chosen_by_groups_they_are_cut_by_columns() -> None:
    grouped = changed_facts(MODEL, is_grouped=True)
    with pytest.raises(PlanError, match="by groups: cut their columns"):
        plan(FIRST, SECOND).validate(grouped, None)
    with pytest.raises(PlanError, match="by groups"):
        with_whole_experts(plan(), grouped, cluster(RATES, RATES), WORKLOAD, chunk_tokens=1)


@pytest.mark.parametrize("value", [[[-1]], [["0"]], [0], {"0": []}, [[True]], [[0] * 1025]])
def test_what_is_no_list_of_numbers_is_refused(value: object) -> None:
    written: Any = plan(FIRST, SECOND).to_json()
    written["stages"][0]["shards"][0]["experts"] = value
    with pytest.raises(PlanError, match="experts"):
        Plan.from_json(written)


def test_memory_goes_by_how_many_there_are() -> None:
    few, many = (0,), (1, 2, 3, 4, 5)
    found, by_columns = plan(few, many), plan()
    own, usual = (memory_use(each, MODEL, WORKLOAD) for each in (found, by_columns))
    moved = (NUM_EXPERTS / 2 - len(few)) * EXPERT_BYTES * LAYERS
    assert own["a"].weight_bytes == usual["a"].weight_bytes - moved
    assert own["b"].weight_bytes == usual["b"].weight_bytes + moved
    devices = cluster(RATES, RATES)
    rows = describe(found, MODEL, devices, WORKLOAD)
    assert [row.held[0].whole_experts for row in rows] == [1, 5]
    assert "1 of the experts" in rows[0].in_words


def test_what_is_lacking_is_counted_expert_by_expert() -> None:
    held, cut = (seats_of(each)[0, 0] for each in (plan(FIRST, SECOND), plan()))
    wanted = seats_of(plan((0, 1, 2), (3, 4, 5)))[0, 0]
    assert lacking_bytes(wanted, [held], MODEL) == LAYERS * EXPERT_BYTES  # number 1
    # Of the columns that are cut half is there.
    assert lacking_bytes(wanted, [cut], MODEL) == LAYERS * 3 * EXPERT_BYTES / 2
    assert lacking_bytes(cut, [wanted], MODEL) == LAYERS * 3 * EXPERT_BYTES / 2


def without_b(shards: tuple[Shard, ...]) -> Plan:
    """The plan after the second of three like devices is lost."""
    before = Plan(model="m", version=0, stages=(Stage(layers=range(LAYERS), shards=shards),))
    found = repair(
        before, MODEL, cluster(RATES, RATES, RATES), ["b"], WORKLOAD, parallel=None,
        may_double=False,
    )  # fmt: skip
    found.plan.validate(MODEL, None)
    return found.plan


def test_what_a_lost_device_had_goes_to_those_that_are_left() -> None:
    shards = tuple(
        shard(device, heads, columns, rows).with_experts((own,) * LAYERS)
        for device, heads, columns, rows, own in (
            ("a", range(2), range(4), range(4), (0, 3)),
            ("b", range(2, 3), range(4, 6), range(4, 8), (2, 4)),
            ("c", range(3, 4), range(6, 8), range(8, 10), (1, 5)),
        )
    )
    left = without_b(shards)
    one, other = left.stages[0].slices
    assert sorted((*one.experts[0], *other.experts[0])) == list(range(NUM_EXPERTS))
    assert {0, 3} <= set(one.experts[0])
    assert {1, 5} <= set(other.experts[0])


def _slowest(
    others_s: list[float], expert_s: list[float], held: list[list[float]], top_k: int
) -> float:
    """Every choice that there is, by how likely it is."""
    every = [(device, chance) for device, own in enumerate(held) for chance in own]
    total = weight = 0.0
    for chosen in itertools.combinations(range(len(every)), top_k):
        likely = math.prod(
            chance if number in chosen else 1 - chance
            for number, (_device, chance) in enumerate(every)
        )
        counts = [sum(every[number][0] == each for number in chosen) for each in range(len(held))]
        seconds = [
            other + each * count
            for other, each, count in zip(others_s, expert_s, counts, strict=True)
        ]
        total += likely * max(seconds)
        weight += likely
    return total / weight


@given(
    held=st.lists(st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3), min_size=1, max_size=3),
    top_k=st.integers(1, 3),
    others_s=st.lists(st.floats(0, 2), min_size=3, max_size=3),
    expert_s=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
)
def test_the_slowest_is_the_mean_over_all_choices(
    held: list[list[float]], top_k: int, others_s: list[float], expert_s: list[float]
) -> None:
    count = len(held)
    if top_k > sum(map(len, held)):
        return
    times = tuple(others_s[:count]), tuple(expert_s[:count])
    found = expected_slowest(*times, tuple(map(tuple, held)), top_k)
    expected = _slowest(others_s[:count], expert_s[:count], held, top_k)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_step_waits_for_who_has_more_of_a_tokens_experts() -> None:
    """Six equal ones on two equal devices: both of a token's are on one in 2 of 5 cases."""
    free = replace(MODEL, kinds=(replace(MODEL.kinds[0], layer_bytes=0),))
    devices = cluster(RATES, RATES)
    cut, whole = (
        seconds_of_steps(each, free, devices).token_s for each in (plan(), plan(FIRST, SECOND))
    )
    of_layer = NUM_EXPERTS * EXPERT_BYTES
    assert whole - cut == pytest.approx(LAYERS * of_layer / 2 * (3 / 5 * 1 + 2 / 5 * 2 - 1))


def test_who_has_those_that_most_tokens_go_through_takes_longer() -> None:
    known = replace(MODEL, expert_uses=uses(0.9, 0.01, 0.9, 0.01, 0.09, 0.09))
    devices = cluster(RATES, RATES)
    even = seconds_of_steps(plan((0, 1, 4), (2, 3, 5)), known, devices)
    uneven = seconds_of_steps(plan((0, 1, 2), (3, 4, 5)), known, devices)
    assert even.token_s < uneven.token_s
    assert dict(even.device_s)["a"] == pytest.approx(dict(even.device_s)["b"])
    assert dict(uneven.device_s)["a"] > 3 * dict(uneven.device_s)["b"]


@pytest.mark.parametrize(
    "wrong", [uses(1.0, 1.0), uses(1, 1, 1, 0, 0, 0), uses(*[math.nan] * 6), uses(2, *[0] * 5)]
)
def test_uses_are_of_each_expert_and_as_many_as_a_token_has(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expert_uses of layer 0"):
        replace(MODEL, expert_uses=wrong)
    with pytest.raises(ValueError, match="an entry for each layer"):
        replace(MODEL, expert_uses=uses(*[1 / 3] * 6)[:2])


def test_a_fast_device_with_little_memory_has_the_busiest() -> None:
    """Four times as fast, with room for two of six in each layer."""
    of_each = [
        tuple(0.1 if number not in (layer, layer + 3) else 0.8 for number in range(NUM_EXPERTS))
        for layer in range(LAYERS)
    ]
    known = replace(MODEL, expert_uses=tuple(of_each))
    fast = replace(RATES, slice_seconds_per_byte=(0.25, 2.75))
    devices = cluster(fast, RATES)
    use = memory_use(plan(), known, WORKLOAD)["a"].total
    room = use - NUM_EXPERTS * EXPERT_BYTES * LAYERS // 2 + 2 * EXPERT_BYTES * LAYERS
    small = tuple(
        replace(each, memory_bytes=room) if each.id == "a" else each for each in devices.devices
    )
    devices = replace(devices, devices=small)
    placed, predicted = with_whole_experts(plan(), known, devices, WORKLOAD, chunk_tokens=1)
    assert [placed.stages[0].slices[0].experts[layer] for layer in range(LAYERS)] == [
        (layer, layer + 3) for layer in range(LAYERS)
    ]
    assert predicted is not None
    assert predicted.token_s < seconds_of_steps(plan(), known, devices).token_s


@pytest.mark.parametrize("seed", range(5))
def test_it_is_as_good_as_the_best_of_all(seed: int) -> None:
    """Of three devices: to within the gap that is asked of HiGHS."""
    chance = [((seed + 3) * (number + 1) ** 2 % 17 + 1) for number in range(NUM_EXPERTS)]
    each = tuple(TOP_K * one / sum(chance) for one in chance)
    known = replace(MODEL, expert_uses=uses(*each))
    speeds = (0.5, 1.0, 1.5)
    devices = cluster(*(replace(RATES, slice_seconds_per_byte=(s, 11 * s)) for s in speeds))
    shards = tuple(
        shard(device, range(number, number + 1 + (number == 2)), columns, rows)
        for number, (device, columns, rows) in enumerate(
            (
                ("a", range(4), range(4)),
                ("b", range(4, 6), range(4, 8)),
                ("c", range(6, 8), range(8, 10)),
            )
        )
    )
    before = Plan(model="m", version=0, stages=(Stage(layers=range(LAYERS), shards=shards),))
    placed, _ = with_whole_experts(before, known, devices, WORKLOAD, chunk_tokens=1)

    def slowest(owners: tuple[int, ...]) -> float:
        others = (4, 2, 2)
        return max(
            speed * (others[device] * SHARED_COLUMN_BYTES + DENSE.kinds[0].layer_bytes / 2)
            + speed * NUM_EXPERTS * EXPERT_BYTES / TOP_K
            * sum(use for use, owner in zip(each, owners, strict=True) if owner == device)
            for device, speed in enumerate(speeds)
        )  # fmt: skip

    every = [
        owners
        for owners in itertools.product(range(3), repeat=NUM_EXPERTS)
        if len(set(owners)) == 3
    ]
    best = min(map(slowest, every))
    for layer in range(LAYERS):
        owners = [0] * NUM_EXPERTS
        for rank, own in enumerate(placed.stages[0].slices):
            for number in own.experts[layer]:
                owners[number] = rank
        assert slowest(tuple(owners)) <= 1.02 * best


def test_the_same_facts_give_the_same_placement(capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing is printed, where JSON may be expected."""
    known = replace(MODEL, expert_uses=uses(0.5, 0.2, 0.4, 0.3, 0.35, 0.25))
    found = [
        with_whole_experts(plan(), known, cluster(RATES, RATES), WORKLOAD, chunk_tokens=1)[0]
        for _ in range(3)
    ]
    assert found[0] == found[1] == found[2]
    assert capfd.readouterr() == ("", "")


def test_without_room_for_one_it_is_told() -> None:
    devices = cluster(RATES, RATES)
    use = memory_use(plan(), MODEL, WORKLOAD)["a"].total
    room = use - NUM_EXPERTS * EXPERT_BYTES * LAYERS // 2
    tight = tuple(replace(each, memory_bytes=room) for each in devices.devices)
    with pytest.raises((PlanError, CapacityError), match=r"room|memory"):
        with_whole_experts(plan(), MODEL, replace(devices, devices=tight), WORKLOAD, chunk_tokens=1)


def test_a_plan_of_one_device_has_nothing_to_place() -> None:
    alone = replace(
        plan(),
        stages=(Stage(layers=range(LAYERS), shards=(shard("a", range(4), range(8), range(10)),)),),
    )
    with pytest.raises(PlanError, match="No stage of the plan is shared"):
        with_whole_experts(alone, MODEL, cluster(RATES, RATES), WORKLOAD, chunk_tokens=1)


def test_what_most_tokens_go_through_is_found_in_memory() -> None:
    """Where layers come from disk, and a text told."""
    streamed = Workload(prompt_tokens=1, output_tokens=10)
    one = shard("a", range(4), range(8), range(10)).streaming(LAYERS)
    alone = Plan(model="m", version=0, stages=(Stage(layers=range(LAYERS), shards=(one,)),))
    many = changed_facts(
        MODEL,
        num_experts=64,
        top_k=2,
        ffn_column_bytes=64 * EXPERT_COLUMN_BYTES + SHARED_COLUMN_BYTES,
    )
    busy = (0.9, 0.9, *[0.2 / 62] * 62)
    known = replace(many, expert_uses=(busy,) * LAYERS)
    usual, told = (memory_use(alone, each, streamed)["a"] for each in (many, known))
    assert told.routed_bytes < usual.routed_bytes / 2
    assert sum(chances(known, 0)) == pytest.approx(2)


def test_of_many_rows_seldom_used_experts_are_wanted_too() -> None:
    """Of one row the busy ones, which stay; of 256 nearly all that do not."""
    sparse = LayerBytes(others=10, experts=64 * 800, num_experts=64, top_k=2)
    rare = 0.2 / 62
    busy = [0.9, 0.9, *[rare] * 62]
    room = 4 * expert_bytes([sparse] * LAYERS)
    for rows in (1, 256):
        told = read_bytes([sparse] * LAYERS, LAYERS, rows, spare_bytes=room, chances=busy * LAYERS)[
            1
        ]
        stay = expert_tiers([sparse] * LAYERS, LAYERS, spare_bytes=room).cache_bytes
        count = LAYERS * 64 - stay // expert_bytes([sparse])
        assert told == pytest.approx(800 * count * (1 - (1 - rare) ** rows))


def test_no_more_experts_are_kept_than_a_device_has() -> None:
    """Where a plan with whole experts reads layers from disk."""
    one, other = plan((0,), (1, 2, 3, 4, 5)).stages[0].slices
    streamed = replace(
        plan(),
        stages=(Stage(layers=range(LAYERS), shards=(one.streaming(2), other.streaming(2))),),
    )
    roomy = cluster(RATES, RATES)
    endless = tuple(replace(each, unused_buffer_bytes=10**12) for each in roomy.devices)
    found = streaming(streamed, MODEL, roomy, WORKLOAD)
    found.validate(MODEL, roomy)
    assert estimate(streamed, MODEL, replace(roomy, devices=endless), WORKLOAD).token_s > 0


def test_where_layers_are_read_from_disk_columns_are_cut() -> None:
    (stage,) = plan().stages
    shards = tuple(shard.streaming(1) for shard in stage.slices)
    streamed = replace(plan(), stages=(replace(stage, shards=shards),))
    with pytest.raises(PlanError, match="reads layers from disk"):
        with_whole_experts(streamed, MODEL, cluster(RATES, RATES), WORKLOAD, chunk_tokens=1)


def test_other_experts_sum_in_another_order() -> None:
    assert _cuts(plan(FIRST, SECOND), MODEL) == _cuts(plan(FIRST, SECOND), MODEL)
    assert _cuts(plan(FIRST, SECOND), MODEL) != _cuts(plan(SECOND, FIRST), MODEL)


@pytest.mark.parametrize("seed", range(4))
def test_many_experts_are_exchanged_until_devices_are_done_together(seed: int) -> None:
    """More than programs are solved for: within a hundredth of what cannot be beaten."""
    random = Random(seed)
    parts = [random.paretovariate(1.2) for _ in range(160)]
    each = [min(0.9, 8 * part / sum(parts)) for part in parts]
    speeds = (1.0, 1.5, 2.0, 4.0)
    devices = [_Device(others_s=0.0, expert_s=1 / speed, most=160) for speed in speeds]
    owners = [index % 4 for index in range(160)]
    found = _exchanged(devices, each, _by_rank(each, owners))
    assert sorted(found) == sorted(owners)
    times = [
        sum(use for use, owner in zip(each, found, strict=True) if owner == index) / speed
        for index, speed in enumerate(speeds)
    ]
    assert max(times) <= 1.01 * sum(each) / sum(speeds)


def test_a_lost_neighbour_leaves_its_experts_to_one_without_any() -> None:
    shards = (
        shard("a", range(2), range(0), range(5)),
        shard("b", range(2, 3), range(4), range(5, 8)).with_experts(((0, 2, 4),) * LAYERS),
        shard("c", range(3, 4), range(4, 8), range(8, 10)).with_experts(((1, 3, 5),) * LAYERS),
    )
    left = without_b(shards)
    every = [number for each in left.stages[0].slices for number in each.experts[0]]
    assert sorted(every) == list(range(NUM_EXPERTS))
