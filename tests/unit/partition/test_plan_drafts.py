"""What drafts gain on a plan, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest

from edge.partition import (
    ClusterSpec,
    Guessing,
    Plan,
    PlanError,
    draft_length,
    estimate,
    guessing,
)
from edge.partition.cost.estimate import step_s
from tests.unit.partition.test_plan_cost import ALONE, CHAIN, MODEL, RATES, WORKLOAD, cluster


def guessed(plan: Plan, devices: ClusterSpec, right: float, *, rewinds: bool = False) -> Guessing:
    return guessing(plan, MODEL, devices, WORKLOAD, right=right, most=15, rewinds=rewinds)


def test_a_step_of_one_row_takes_what_a_token_takes() -> None:
    """And of more rows, what devices measured and links carry."""
    near, far = cluster(RATES), cluster(RATES, RATES, latency_s=500.0)
    for plan, devices in ((ALONE, near), (CHAIN, far)):
        one = estimate(plan, MODEL, devices, WORKLOAD).token_s
        assert step_s(plan, MODEL, devices, WORKLOAD, rows=1) == pytest.approx(one)
    # 450 bytes of layers and 30 of the head, a tenth of a second a byte more for each row.
    assert step_s(ALONE, MODEL, near, WORKLOAD, rows=6) == pytest.approx(480 * 1.5)


def test_keys_and_values_are_read_once_for_all_rows_of_a_draft() -> None:
    """Each further row takes what a row of a chunk does: 12 heads, 6 cached tokens."""
    rates = replace(RATES, attention_s=(4.0, 0.5))
    rows = [step_s(ALONE, MODEL, cluster(each), WORKLOAD, rows=3) for each in (RATES, rates)]
    assert rows[1] - rows[0] == pytest.approx(12 * 6 * (4.0 + 2 * 0.5))


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_the_gain_follows_from_the_share_of_right_guesses(right: float) -> None:
    found = guessed(ALONE, cluster(RATES), right)
    expected = sum(right**each for each in range(found.drafted + 1))
    assert found.tokens_per_pass == pytest.approx(expected)
    seconds = 480 * (1 + 0.1 * found.drafted)
    assert found.tokens_per_s == pytest.approx(expected / seconds)
    for length in range(1, 16, 2):
        other = sum(right**each for each in range(length + 1)) / (480 * (1 + 0.1 * length))
        assert other <= found.tokens_per_s * (1 + 1e-9)


def test_drafts_are_longer_over_a_slow_link() -> None:
    near = cluster(RATES, RATES)
    far = cluster(RATES, RATES, latency_s=2000.0)
    assert guessed(CHAIN, far, 0.8).drafted > guessed(CHAIN, near, 0.8).drafted
    gains = [
        guessed(CHAIN, devices, 0.8).tokens_per_s
        * estimate(CHAIN, MODEL, devices, WORKLOAD).token_s
        for devices in (near, far)
    ]
    assert gains[0] < gains[1]


def test_rows_that_are_computed_again_count() -> None:
    """And make drafts shorter, of which fewer guesses are wrong."""
    plain, again = (guessed(ALONE, cluster(RATES), 0.7, rewinds=each) for each in (False, True))
    assert again.tokens_per_s < plain.tokens_per_s
    assert again.drafted <= plain.drafted
    sure, always = (guessed(ALONE, cluster(RATES), 1.0, rewinds=each) for each in (False, True))
    assert sure.tokens_per_s == pytest.approx(always.tokens_per_s)
    assert sure.drafted == 15


def test_rows_before_a_draft_make_their_number_even() -> None:
    def seconds(rows: int) -> float:
        return 1 + 0.05 * rows

    for again in range(16):
        length = draft_length(0.6, seconds, 15 - again, again=again, rewinds=True)
        assert (again + 1 + length) % 2 == 0
        assert length <= 15 - again
    assert draft_length(0.0, lambda rows: math.sqrt(rows), 14, again=1, rewinds=True) == 0


def test_where_a_device_was_not_measured_nothing_is_known() -> None:
    devices = cluster(RATES)
    (device,) = devices.devices
    unknown = ClusterSpec(devices=(replace(device, rates=None),))
    with pytest.raises(PlanError, match="has not been measured"):
        guessed(ALONE, unknown, 0.5)
