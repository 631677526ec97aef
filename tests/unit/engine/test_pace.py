"""How a shard's steps go against what was predicted of them."""

from __future__ import annotations

import math

import pytest

from edge.engine.timing import ShardCounters, StepPace
from edge.protocol.step import Step, StepEntry
from edge.protocol.step_times import ExpectedStep, TokenSteps

EXPECTED = ExpectedStep(first_s=0.010, last_s=0.020, tokens=1000)


def test_what_is_cached_is_expected_to_take_time() -> None:
    assert [EXPECTED.at(position) for position in (0, 500, 1000, 5000)] == pytest.approx(
        [0.010, 0.015, 0.020, 0.020]
    )


@pytest.mark.parametrize("first_s", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(first_s: float) -> None:
    with pytest.raises(ValueError, match="finite and above 0"):
        ExpectedStep(first_s=first_s, last_s=1.0, tokens=1)


def test_the_median_of_the_latest_steps_is_told_for_a_while() -> None:
    pace = StepPace(EXPECTED)
    assert pace.slower(now_s=0.0, within_s=60.0) is None
    for step in range(32):
        hiccup = step % 8 == 0
        pace.note(9.0 if hiccup else 0.030, position=500, now_s=float(step))
    assert pace.slower(now_s=40.0, within_s=60.0) == pytest.approx(2.0)
    assert pace.slower(now_s=100.0, within_s=60.0) is None
    for step in range(100, 132):
        pace.note(0.010, position=0, now_s=float(step))
    assert pace.slower(now_s=140.0, within_s=60.0) == pytest.approx(1.0)


def test_nothing_is_told_where_nothing_was_predicted() -> None:
    pace = StepPace(None)
    for step in range(64):
        pace.note(1.0, position=step, now_s=float(step))
    assert pace.slower(now_s=64.0, within_s=60.0) is None


def test_steps_of_one_token_each_are_counted_without_the_first() -> None:
    """It makes buffers. Chunks of prompts and steps with guesses are no measure of a device."""

    def step(*positions: int, tokens: tuple[int, ...] = (1,)) -> Step:
        return Step(
            entries=tuple(
                StepEntry(request=f"r{number}", position=position, tokens=tokens, logit_rows=1)
                for number, position in enumerate(positions)
            )
        )

    counters = ShardCounters()
    counters.computed(step(0, tokens=(1, 2, 3)), 5.0, now_s=0.0)
    counters.computed(step(3), 4.0, now_s=0.0)
    assert counters.count() == TokenSteps()
    counters.computed(step(4), 1.0, now_s=0.0)
    before = counters.count()
    counters.computed(step(5, 20), 2.0, now_s=0.0)
    counters.computed(step(6, tokens=(1, 2)), 3.0, now_s=0.0)
    assert before == TokenSteps(steps=1, rows=1, tokens=4, compute_s=1.0)
    assert counters.count() == TokenSteps(steps=2, rows=3, tokens=29, compute_s=3.0)
    assert counters.count().since(before) == TokenSteps(steps=1, rows=2, tokens=25, compute_s=2.0)
