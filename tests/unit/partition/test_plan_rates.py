"""Rates: reading between the points that were measured, and what is refused."""

from dataclasses import replace

import pytest

from edge.partition import ComputeRates, DeviceSpec, Workload, choose, estimate
from tests.unit.partition.test_choose import SMALL, cluster
from tests.unit.partition.test_repair import FAST, SHORT

RATES = ComputeRates(
    rows=(1, 4, 32),
    seconds_per_byte=(1.0, 4.0, 60.0),
    shared_seconds_per_byte=(2.0, 8.0, 120.0),
    slice_seconds_per_byte=(0.5, 2.0, 30.0),
    attention_slice_s=(0.1, 0.4, 6.0),
    feed_forward_slice_s=(0.2, 0.5, 7.0),
    attention_s=(0.5, 0.25, 0.125),
    run_s=0.1,
    jitter=0.2,
    sample_s=0.3,
    step_s=0.4,
)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 1.0), (2, 2.0), (4, 4.0), (18, 32.0), (32, 60.0), (46, 88.0)]
)
def test_times_lie_straight_between_the_points_and_beyond_the_last(
    rows: float, seconds: float
) -> None:
    assert RATES.weights_s(rows, shared=False) == pytest.approx(seconds)
    assert RATES.weights_s(rows, shared=True) == pytest.approx(2 * seconds)


def test_attention_is_the_time_of_all_rows() -> None:
    assert RATES.attention_step_s(1) == pytest.approx(0.5)
    assert RATES.attention_step_s(4) == pytest.approx(1.0)
    assert RATES.attention_step_s(32) == pytest.approx(4.0)
    assert RATES.attention_step_s(18) == pytest.approx(2.5)


def test_slices_are_read_between_the_points_as_well() -> None:
    assert RATES.slice_weights_s(18) == pytest.approx(16.0)
    assert RATES.slice_fixed_s(18) == pytest.approx((3.2, 3.75))


def test_one_point_grows_with_the_rows() -> None:
    one = replace(
        RATES,
        rows=(1,),
        seconds_per_byte=(2.0,),
        shared_seconds_per_byte=(2.0,),
        slice_seconds_per_byte=(1.5,),
        attention_slice_s=(0.5,),
        feed_forward_slice_s=(0.25,),
        attention_s=(1.0,),
    )
    assert one.weights_s(7, shared=False) == pytest.approx(14.0)
    assert one.slice_weights_s(2) == pytest.approx(3.0)
    assert one.slice_fixed_s(2) == pytest.approx((1.0, 0.5))


def test_a_falling_last_slope_counts_as_flat() -> None:
    noisy = replace(RATES, seconds_per_byte=(1.0, 4.0, 3.0))
    assert noisy.weights_s(1000, shared=False) == pytest.approx(3.0)


def test_devices_that_are_alike_get_what_most_of_them_measured() -> None:
    slow = replace(
        RATES,
        seconds_per_byte=tuple(2 * each for each in RATES.seconds_per_byte),
        run_s=3 * RATES.run_s,
        disk_bytes_per_s=5e8,
    )
    found = ComputeRates.median([RATES, slow, RATES])
    assert found == replace(RATES, disk_bytes_per_s=5e8, spread=found.spread)
    assert found.spread == (1.0, 2.0), "how far they are apart counts"
    assert ComputeRates.median([slow]) == slow


def test_a_pace_is_that_of_its_rows_and_goes_on_as_it_ends() -> None:
    found = RATES.at_pace((1, 7), (2.0, 4.0))
    assert found.seconds_per_byte == (2.0, 12.0, 240.0)
    assert found.slice_seconds_per_byte == (1.0, 6.0, 120.0)
    assert found.feed_forward_slice_s == (0.4, 1.5, 28.0)
    assert replace(RATES, run_s=1.0).at_pace((1, 7), (2.0, 4.0)).run_s == 1.0
    assert found.attention_s == RATES.attention_s


def test_a_host_is_a_name() -> None:
    with pytest.raises(ValueError, match="host"):
        DeviceSpec(id="a", name="a", memory_bytes=1, threads=1, host="two\nlines")


def test_reserved_tokens_are_what_memory_is_kept_for() -> None:
    workload = Workload(prompt_tokens=5, output_tokens=3, concurrency=2, reserved_tokens=100)
    assert (workload.context_tokens, workload.cached_tokens) == (8, 100)
    with pytest.raises(ValueError, match="reserved_tokens"):
        Workload(reserved_tokens=0)


def test_a_slowed_device_takes_longer_for_all_that_it_computes() -> None:
    devices = cluster((4, FAST), (4, FAST), (4, FAST))
    plan = choose(SMALL, devices, SHORT, parallel="pipeline").plan
    slowed = devices.slowed_by({"01": 3.0})
    before, after = (
        dict(estimate(plan, SMALL, each, SHORT).device_s) for each in (devices, slowed)
    )
    assert after == pytest.approx({id: before[id] * (3 if id == "01" else 1) for id in before})
    assert [device.slowed for device in slowed.devices] == [1, 3, 1]
    again = slowed.slowed_by({"01": 6.0, "unknown": 2.0}).slowed_by({})
    assert dict(estimate(plan, SMALL, again, SHORT).device_s) == pytest.approx(before)
    unmeasured = replace(devices.devices[0], rates=None)
    assert unmeasured.slowed_by(2.0) == unmeasured
    with pytest.raises(ValueError, match="slowed of device"):
        replace(unmeasured, slowed=0.0)
