"""Devices that join while a plan runs: when it gives way to another one, and when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge.partition import (
    ClusterSpec,
    ModelFacts,
    Plan,
    UnderWay,
    check_fit,
    choose,
    join,
    repair,
)
from tests.unit.partition.test_choose import CABLE, SMALL, cluster
from tests.unit.partition.test_repair import FAST, FOUR_RANKS, SHORT

LONG_ANSWER = UnderWay(requests=1, prompt_tokens=100, answer_tokens=50, left_tokens=4000)


def alone(model: ModelFacts, devices: ClusterSpec, *, stream: bool = False) -> Plan:
    """On the first device."""
    _first, *others = [device.id for device in devices.devices]
    return choose(model, devices.without(*others), SHORT, stream=stream).plan


def joined(plan: Plan, devices: ClusterSpec, under_way: UnderWay = LONG_ANSWER, **more: Any) -> Any:
    move = join(plan, SMALL, devices, SHORT, under_way, **more)
    assert (move.when == "stay") == (move.to is None)
    if move.to is not None:
        assert move.to.plan.version == plan.version + 1
        check_fit(move.to.plan, SMALL, devices, SHORT, is_repaired=True)
    return move


def test_a_much_faster_device_takes_an_answer_over_at_once() -> None:
    devices = cluster((4, FAST / 8), (4, FAST))
    move = joined(alone(SMALL, devices), devices)
    assert move.when == "now"
    assert move.to.plan.devices == ("01",)
    assert move.to.same_sums
    assert move.ships_s == pytest.approx(move.to.lacking_bytes["01"] / 117e6)
    # Loaded, the prompt computed again, and the answer so far.
    predicted = move.to.predicted
    load_s = joined(alone(SMALL, devices), devices, UnderWay()).pause_s
    again_s = predicted.first_token_s + 50 * predicted.token_s
    assert move.pause_s == pytest.approx(load_s + again_s)
    left_s = 60 - move.pause_s - 0.1 * move.ships_s
    without = 60 / move.before.token_s
    assert move.gained_tokens == pytest.approx(left_s / predicted.token_s - without)


def test_an_answer_that_is_soon_done_is_waited_for() -> None:
    devices = cluster((4, FAST / 8), (4, FAST))
    soon_done = replace(LONG_ANSWER, left_tokens=3)
    assert joined(alone(SMALL, devices), devices, soon_done).when == "idle"
    assert joined(alone(SMALL, devices), devices, UnderWay()).when == "now"


def test_what_would_sum_in_another_order_waits_until_nothing_is_under_way() -> None:
    """Two equal devices with a fast link share every layer, which is nearly twice as fast."""
    devices = cluster((4, FAST), (4, FAST), link=CABLE)
    move = joined(alone(SMALL, devices), devices)
    assert (move.when, move.to.same_sums) == ("idle", False)
    assert joined(alone(SMALL, devices), devices, parallel="pipeline").when == "stay"


def test_while_answers_are_under_way_only_devices_of_the_same_bits_join() -> None:
    devices = cluster((4, FAST / 8), (4, FAST))
    assert joined(alone(SMALL, devices), devices, same_bits={"00"}).when == "idle"


def test_no_gain_no_move() -> None:
    """Slow, or too little faster for what predictions are worth, or slow to reach."""
    for devices in (
        cluster((4, FAST), (4, FAST / 4)),
        cluster((4, FAST), (4, FAST * 1.08)),
        cluster((4, FAST), (4, FAST), link=(5e-3, 10e6)),
    ):
        for under_way in (UnderWay(), LONG_ANSWER):
            assert joined(alone(SMALL, devices), devices, under_way).when == "stay"


def test_weights_that_take_long_to_send_do_not_pay() -> None:
    devices = cluster((4, FAST / 2), (4, FAST))
    slow = {"01": 1e6}
    assert joined(alone(SMALL, devices), devices, send_bytes_per_s=slow).when == "stay"
    assert joined(alone(SMALL, devices), devices).when == "now"


def test_who_has_two_seats_gives_one_back() -> None:
    """A rank was lost, and taken by another rank's device beside its own; now it is there again."""
    devices = cluster(*[(4, FAST)] * 4, link=CABLE)
    left = devices.without("03")
    doubled = repair(FOUR_RANKS, SMALL, devices, {"03"}, SHORT, keeps_shape=True)
    assert doubled.method == "doubled"
    # Once nothing waits for the same bits, three equal parts are better than two and one.
    assert joined(doubled.plan, left).when == "idle"
    move = joined(doubled.plan, devices)
    assert move.when == "now"
    assert move.to.same_sums
    assert set(move.to.plan.devices) == {"00", "01", "02", "03"}
    # A plan by hand is what is gone back to, and nothing else.
    by_hand = joined(doubled.plan, devices, wanted=FOUR_RANKS)
    assert by_hand.to.plan.stages == FOUR_RANKS.stages
    assert joined(doubled.plan, left, wanted=FOUR_RANKS).when == "stay"
    assert joined(FOUR_RANKS, devices, wanted=FOUR_RANKS).when == "stay"


def test_a_model_that_reads_from_disk_goes_back_into_memory() -> None:
    devices = cluster((0.5, FAST), (4, FAST))
    streamed = alone(SMALL, devices, stream=True)
    assert streamed.stages[0].slices[0].streamed_layers
    assert joined(streamed, devices).when == "now"
    unmeasured = ClusterSpec(
        devices=tuple(replace(device, rates=None) for device in devices.devices)
    )
    waits = joined(streamed, unmeasured)
    assert (waits.when, waits.gained_tokens) == ("idle", None)
    move = joined(streamed, unmeasured, UnderWay())
    assert move.when == "now"
    assert not any(each.streamed_layers for each in move.to.plan.stages[0].slices)


def pipelined(devices: ClusterSpec) -> Plan:
    return choose(SMALL, devices, SHORT, parallel="pipeline").plan


def test_a_slowed_device_gives_layers_away_and_gets_them_back() -> None:
    devices = cluster(*[(4, FAST)] * 3)
    plan = pipelined(devices)
    busy = max(plan.stages, key=lambda stage: len(stage.layers)).shards[0].device
    move = joined(plan, devices.slowed_by({busy: 4.0}))
    assert (move.when, move.to.same_sums) == ("now", True)
    assert move.before.token_s > 2 * move.to.predicted.token_s
    left = sum(len(each.layers) for each in move.to.plan.stages if each.shards[0].device == busy)
    assert left < max(len(each.layers) for each in plan.stages)
    assert joined(plan, devices).when == "stay"


@pytest.mark.parametrize(("is_healthy_again", "when"), [(False, "stay"), (True, "now")])
def test_less_gain_is_enough_for_the_way_back(is_healthy_again: bool, when: str) -> None:
    devices = cluster((4, FAST), (4, FAST * 1.08))
    plan = alone(SMALL, devices)
    move = joined(plan, devices, UnderWay(), is_healthy_again=is_healthy_again)
    assert move.when == when
