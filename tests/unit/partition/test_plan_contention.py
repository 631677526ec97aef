"""What devices of one host take from each other's memory, against what was measured of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition import ComputeRates, DeviceSpec
from partition.cost.contention import memory_rate

seconds = st.integers(1, 1000).map(lambda part: part * 1e-12)


def device(id: str, alone_s: float, shared_s: float, host: str = "h") -> DeviceSpec:
    rates = ComputeRates(
        rows=(1,),
        seconds_per_byte=(alone_s,),
        shared_seconds_per_byte=(shared_s,),
        slice_seconds_per_byte=(alone_s,),
        attention_slice_s=(0.0,),
        feed_forward_slice_s=(0.0,),
        attention_s=(0.0,),
        run_s=0.0,
        jitter=0.0,
        sample_s=0.0,
        step_s=0.0,
    )
    return DeviceSpec(id=id, name=id, memory_bytes=1, threads=1, host=host, rates=rates)


@st.composite
def hosts(draw: st.DrawFn) -> list[DeviceSpec]:
    """Two to five devices of one host, each slowed by the others up to ten times."""
    found = []
    for number in range(draw(st.integers(2, 5))):
        alone_s = draw(seconds)
        found.append(device(f"d{number}", alone_s, alone_s * draw(st.floats(1, 10))))
    return found


def took_s(one: DeviceSpec, read: dict[str, float], host: list[DeviceSpec]) -> float:
    stage = [each for each in host if each.id in read]
    return memory_rate(one, stage, host, 1).seconds(read[one.id], sum(read.values()))


@given(hosts())
def test_who_reads_as_in_the_measurement_takes_as_long(host: list[DeviceSpec]) -> None:
    read = {
        each.id: 1 / each.rates.shared_seconds_per_byte[0]
        for each in host
        if each.rates is not None
    }
    for each in host:
        assert took_s(each, read, host) == pytest.approx(1.0)


@given(hosts(), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_bytes_of_anyone_cost_time_and_own_bytes_more(
    host: list[DeviceSpec], parts: list[float]
) -> None:
    read = {each.id: part for each, part in zip(host, parts, strict=False)}
    for each in host:
        base_s = took_s(each, read, host)
        own_s = took_s(each, {**read, each.id: read[each.id] + 1}, host) - base_s
        for other in host:
            if other is not each:
                more = {**read, other.id: read[other.id] + 1}
                assert -1e-18 <= took_s(each, more, host) - base_s <= own_s


def test_alone_in_its_stage_or_on_its_host_it_is_as_fast_as_alone() -> None:
    one, near, far = device("a", 1, 3), device("b", 1, 3), device("c", 1, 3, host="other")
    host = [one, near, far]
    assert memory_rate(one, [one], host, 1).seconds(5, 5) == 5
    assert memory_rate(one, [one, far], host, 1).seconds(5, 10) == 5
    homeless = replace(one, host="")
    assert memory_rate(homeless, [homeless, near], [homeless, near], 1).seconds(5, 10) == 5


def test_equal_shares_of_unequal_devices_are_faster_than_at_full_contention() -> None:
    """Seconds per byte of three devices, of which the slowest read as much as the others."""
    host = [
        device("a", 4.29e-11, 6.60e-11),
        device("b", 7.97e-11, 13.66e-11),
        device("c", 16.45e-11, 27.60e-11),
    ]
    rate = memory_rate(host[2], host, host, 1)
    assert rate.seconds(10, 32) / 10 == pytest.approx(20.4e-11, rel=0.01)


def test_two_that_get_in_each_others_way_entirely_have_the_memory_in_turn() -> None:
    host = [device("a", 1, 2), device("b", 1, 2)]
    rate = memory_rate(host[0], host, host, 1)
    assert rate.seconds(5, 10) == pytest.approx(10)
    assert 9 < rate.seconds(2, 10) < 10
