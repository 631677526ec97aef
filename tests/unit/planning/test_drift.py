"""Which part of a prediction was wrong: a table of what peers measured, and what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.partition import Estimate, Plan, Shard, Stage, Term
from edge.planning.breakdown import step_parts
from edge.planning.drift import LEAST_EXCESS_S, SLOWER_BY, FinishedAnswer, find_drift
from edge.protocol.step_times import PeerTimes, StepTimes

NAMES = {"id-a": "a", "id-b": "b", "id-c": "c"}
NEW_TOKENS = 101


def plan(*stages: tuple[str, ...], streamed_layers: int = 0) -> Plan:
    """Which devices share which stage; the slices do not matter here."""
    return Plan(
        model="m",
        version=0,
        stages=tuple(
            Stage(
                layers=range(number, number + 1),
                shards=tuple(
                    Shard(
                        device=device,
                        heads=range(1),
                        ffn_columns=range(1),
                        vocab=range(1),
                        streamed_layers=streamed_layers,
                    )
                    for device in devices
                ),
            )
            for number, devices in enumerate(stages)
        ),
    )


def answer(
    *terms: tuple[str, float], devices_s: dict[str, float], slower_s: float
) -> FinishedAnswer:
    """A reply that was predicted to take these terms for each token and took `slower_s` more."""
    token_s = sum(seconds for _kind, seconds in terms)
    predicted = Estimate(
        tokens_per_s_range=(1.0, 1.0),
        first_token_s=1.0,
        token_s=token_s,
        tokens_per_s=1 / token_s,
        terms=tuple(
            Term(kind=kind, where="somewhere", count=1, seconds=seconds)  # type: ignore[arg-type]
            for kind, seconds in terms
        ),
        bottleneck="the first",
        device_s=tuple(devices_s.items()),
    )
    return FinishedAnswer(
        new_tokens=NEW_TOKENS,
        first_token_s=1.0,
        decode_s=(NEW_TOKENS - 1) * (token_s + slower_s),
        predicted=predicted,
    )


def times(
    stage: int, rank: int, *, compute_s: float, reduce_s: float = 0.0, load_s: float = 0.0
) -> PeerTimes:
    """A peer whose every decoded token took so long."""
    steps = NEW_TOKENS - 1
    return PeerTimes(
        name="unused",
        stage=stage,
        rank=rank,
        prompt=StepTimes(steps=1, compute_s=1.0),
        decode=StepTimes(
            steps=steps,
            compute_s=steps * compute_s,
            reduce_s=steps * reduce_s,
            load_s=steps * load_s,
        ),
        resident_bytes=1,
        peak_bytes=1,
    )


PAIR = plan(("id-a", "id-b"))
PAIR_TERMS = (("compute", 0.020), ("reduce", 0.004), ("wait", 0.001))
PAIR_S = {"id-a": 0.020, "id-b": 0.019}


def test_as_predicted_is_no_drift() -> None:
    found = find_drift(
        [answer(*PAIR_TERMS, devices_s=PAIR_S, slower_s=0.0)],
        [
            times(0, 0, compute_s=0.020, reduce_s=0.005),
            times(0, 1, compute_s=0.019, reduce_s=0.006),
        ],
        PAIR,
        NAMES,
    )
    assert found is None
    assert find_drift([], [], PAIR, NAMES) is None


def test_a_device_that_slowed_down_is_named_though_the_others_wait_for_it() -> None:
    """b computes twice as long; a only sees that its sums take longer."""
    found = find_drift(
        [answer(*PAIR_TERMS, devices_s=PAIR_S, slower_s=0.020)],
        [
            times(0, 0, compute_s=0.020, reduce_s=0.024),
            times(0, 1, compute_s=0.039, reduce_s=0.005),
        ],
        PAIR,
        NAMES,
    )
    assert found is not None
    assert (found.kind, found.devices) == ("compute", ("id-b",))
    assert found.slower == pytest.approx((1 + 100 * 0.045) / (1 + 100 * 0.025))
    assert "computing on b took 39.0 ms a token instead of 19.0 ms" in found.message
    assert "something else keeps it busy" in found.message


def test_a_network_that_slowed_down_is_seen_where_nobody_waits_for_a_shard() -> None:
    found = find_drift(
        [answer(*PAIR_TERMS, devices_s=PAIR_S, slower_s=0.020)],
        [
            times(0, 0, compute_s=0.020, reduce_s=0.025),
            times(0, 1, compute_s=0.019, reduce_s=0.026),
        ],
        PAIR,
        NAMES,
    )
    assert found is not None
    assert (found.kind, found.devices) == ("sums", ("id-a", "id-b"))
    assert "summing over a and b took 25.0 ms a token instead of 5.0 ms" in found.message


def test_time_that_no_stage_spent_was_spent_between_them() -> None:
    found = find_drift(
        [
            answer(
                ("compute", 0.030), ("hop", 0.002),
                devices_s={"id-a": 0.010, "id-b": 0.020}, slower_s=0.030,
            )
        ],
        [times(0, 0, compute_s=0.010), times(1, 0, compute_s=0.020)],
        plan(("id-a",), ("id-b",)),
        NAMES,
    )  # fmt: skip
    assert found is not None
    assert (found.kind, found.devices) == ("messages", ("id-a", "id-b"))
    assert "took 32.0 ms a token instead of 2.0 ms" in found.message


def test_of_two_tensor_stages_the_one_with_the_slow_sums_is_named() -> None:
    found = find_drift(
        [
            answer(
                ("compute", 0.020), ("reduce", 0.004),
                devices_s=dict.fromkeys(NAMES, 0.010) | {"id-d": 0.010}, slower_s=0.050,
            )
        ],
        [
            times(0, 0, compute_s=0.010, reduce_s=0.002),
            times(0, 1, compute_s=0.010, reduce_s=0.002),
            times(1, 0, compute_s=0.010, reduce_s=0.053),
            times(1, 1, compute_s=0.010, reduce_s=0.052),
        ],
        plan(("id-a", "id-b"), ("id-c", "id-d")),
        {**NAMES, "id-d": "d"},
    )  # fmt: skip
    assert found is not None
    assert (found.kind, found.devices) == ("sums", ("id-c", "id-d"))
    assert "summing over c and d" in found.message


def test_a_wait_of_microseconds_is_no_disk() -> None:
    """Peers count those in every step; this one lost its time outside of its graphs."""
    found = find_drift(
        [answer(("compute", 0.020), devices_s={"id-a": 0.020}, slower_s=0.030)],
        [times(0, 0, compute_s=0.019, load_s=3e-6)],
        plan(("id-a",)),
        NAMES,
    )
    assert found is not None
    assert found.kind == "prompt"


def test_a_slow_disk_is_not_taken_for_the_network() -> None:
    """Stages that read layers for each token: b's disk has become slow."""
    terms = (("compute", 0.020), ("load", 0.010), ("copy", 0.005), ("hop", 0.001))
    devices_s = {"id-a": 0.010, "id-b": 0.010}
    found = find_drift(
        [answer(*terms, devices_s=devices_s, slower_s=0.030)],
        [
            times(0, 0, compute_s=0.010, load_s=0.005),
            times(1, 0, compute_s=0.010, load_s=0.040),
        ],
        plan(("id-a",), ("id-b",), streamed_layers=1),
        NAMES,
    )
    assert found is not None
    assert (found.kind, found.devices) == ("load", ("id-a", "id-b"))
    assert "read for each token on a and b took 45.0 ms a token instead of 15.0 ms" in found.message


def test_a_prompt_that_was_read_slowly() -> None:
    slow = replace(
        answer(("compute", 0.010), devices_s={"id-a": 0.010}, slower_s=0.0), first_token_s=4.0
    )
    found = find_drift([slow], [times(0, 0, compute_s=0.010)], plan(("id-a",)), NAMES)
    assert found is not None
    assert found.kind == "prompt"
    assert "reading the prompt took 4.00 s instead of 1.00 s" in found.message


def test_a_reply_of_one_token_is_all_prompt() -> None:
    short = replace(
        answer(("compute", 0.010), devices_s={"id-a": 0.010}, slower_s=0.0),
        new_tokens=1, decode_s=0.0, first_token_s=2.0,
    )  # fmt: skip
    found = find_drift([short], [times(0, 0, compute_s=0.0)], plan(("id-a",)), NAMES)
    assert found is not None
    assert found.kind == "prompt"


@pytest.mark.parametrize(
    ("slower_s", "is_told"),
    [
        (0.9 * LEAST_EXCESS_S, False),
        (1.1 * LEAST_EXCESS_S, True),
    ],
)
def test_what_nobody_would_notice_is_not_told(slower_s: float, is_told: bool) -> None:
    quick = answer(("compute", 1e-4), devices_s={"id-a": 1e-4}, slower_s=0.0)
    quick = replace(
        quick,
        predicted=replace(quick.predicted, first_token_s=0.01),
        first_token_s=0.01 + slower_s,
    )
    found = find_drift([quick], [times(0, 0, compute_s=1e-4)], plan(("id-a",)), NAMES)
    assert (found is not None) == is_told


@pytest.mark.parametrize(("share", "is_told"), [(0.95, False), (1.05, True)])
def test_a_small_part_of_a_long_time_is_not_told(share: float, is_told: bool) -> None:
    long = answer(("compute", 1.0), devices_s={"id-a": 1.0}, slower_s=0.0)
    excess_s = share * (SLOWER_BY - 1) * long.predicted_s
    slow = replace(long, decode_s=long.decode_s + excess_s)
    found = find_drift(
        [slow], [times(0, 0, compute_s=1.0 + excess_s / (NEW_TOKENS - 1))], plan(("id-a",)), NAMES
    )
    assert (found is not None) == is_told


def test_a_device_with_two_shards_computes_what_both_take() -> None:
    told = answer(("compute", 0.020), devices_s={"id-a": 0.020}, slower_s=0.020)
    seats = [times(0, 0, compute_s=0.015), times(1, 0, compute_s=0.025)]
    found = find_drift([told], seats, plan(("id-a",), ("id-a",)), NAMES)
    assert found is not None
    assert "computing on a took 40.0 ms a token instead of 20.0 ms" in found.message


def test_layers_from_disk_that_nobody_waits_for_are_told_with_what_was_predicted() -> None:
    """The device that reads waits for the one that computes."""
    told = answer(("compute", 0.030), ("load", 0.002), devices_s=PAIR_S, slower_s=0.0)
    pair = plan(("id-a", "id-b"), streamed_layers=1)
    (stage,) = pair.stages
    alone = replace(stage.slices[1], streamed_layers=0)
    parts = step_parts(
        replace(pair, stages=(replace(stage, shards=(stage.shards[0], alone)),)),
        [(1.0, told.predicted)],
        [
            times(0, 0, compute_s=0.010, load_s=0.005, reduce_s=0.020),
            times(0, 1, compute_s=0.030, reduce_s=0.001),
        ],
        0.035,
    )
    (disk,) = [each for each in parts if each.kind == "load"]
    assert (disk.devices, disk.predicted_s, disk.actual_s) == (("id-a",), 0.002, 0.0)


def test_the_parts_of_a_stage_whose_shards_wait_for_each_other_are_a_token() -> None:
    """Of the shard that the others wait for, and of each stage one."""
    terms = (
        ("compute", 0.020),
        ("reduce", 0.004),
        ("wait", 0.001),
        ("sample", 1e-3),
        ("hop", 2e-3),
    )
    told = answer(*terms, devices_s=PAIR_S | {"id-c": 0.010}, slower_s=0.0)
    parts = step_parts(
        plan(("id-a", "id-b"), ("id-c",)),
        [(0.25, told.predicted), (0.75, told.predicted)],
        [
            times(0, 0, compute_s=0.020, reduce_s=0.024),
            times(0, 1, compute_s=0.039, reduce_s=0.005),
            times(1, 0, compute_s=0.010),
        ],
        0.060,
    )
    assert [(each.kind, each.devices) for each in parts] == [
        ("compute", ("id-a",)),
        ("compute", ("id-b",)),
        ("compute", ("id-c",)),
        ("sums", ("id-a", "id-b")),
        ("sample", ("id-c",)),
        ("messages", ("id-a", "id-b", "id-c")),
    ]
    assert [each.actual_s for each in parts[3:]] == pytest.approx([0.005, 0.0, 0.006])
    assert [each.predicted_s for each in parts[3:]] == pytest.approx([0.005, 1e-3, 2e-3])
