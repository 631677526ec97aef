"""What devices of one host add to the sums of a stage, against what was measured of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.partition import ClusterSpec, CrowdSpec, DeviceSpec
from edge.partition.cost.contention import Crowds, shares_host
from tests.support.facts import crowd_of

NEAR = [
    DeviceSpec(id=id, name=id, memory_bytes=1, threads=1, host="h", rates=None) for id in "abcdef"
]
FAR = [replace(each, id=f"{each.id}2", host="other") for each in NEAR]
TWO = crowd_of(2, (1.0, 2.0), rows=(1, 101))
FOUR = crowd_of(4, (9.0, 18.0), rows=(1, 101), slower=(3.0, 3.0))


def crowds(*known: CrowdSpec) -> Crowds:
    return Crowds(ClusterSpec(devices=(*NEAR, *FAR), crowds=known))


def test_what_was_measured_is_what_it_costs() -> None:
    found = crowds(TWO, FOUR)
    assert found.sum_s(NEAR[:2], 1) == 1.0
    assert found.sum_s(NEAR[:2], 101) == 2.0
    assert found.sum_s(NEAR[:2], 51) == pytest.approx(1.5)
    assert found.sum_s(NEAR[:2], 201) == pytest.approx(3.0)
    assert found.sum_s(NEAR[1:5], 1) == 9.0


def test_a_count_that_was_not_measured_lies_between_or_grows() -> None:
    found = crowds(TWO, FOUR)
    assert found.sum_s(NEAR[:3], 1) == pytest.approx(5.0)
    assert found.sum_s(NEAR[:5], 1) == pytest.approx(12.0)
    assert crowds(FOUR).sum_s(NEAR[:2], 1) == pytest.approx(3.0)


def test_who_is_alone_on_a_host_or_where_nothing_is_known_costs_nothing() -> None:
    assert crowds().sum_s(NEAR, 1) == 0.0
    assert crowds(TWO).sum_s([NEAR[0], FAR[0]], 1) == 0.0
    assert crowds(TWO).sum_s(FAR[:2], 1) == 0.0
    homeless = [replace(each, host="") for each in NEAR[:2]]
    assert crowds(TWO).sum_s(homeless, 1) == 0.0


def test_the_host_that_costs_most_counts() -> None:
    other = replace(TWO, host="other", sum_s=(7.0, 7.0))
    assert crowds(TWO, other).sum_s([*NEAR[:2], *FAR[:2]], 1) == 7.0


def test_devices_without_a_host_are_near_nobody() -> None:
    assert shares_host(NEAR[:2], NEAR[0])
    assert not shares_host([NEAR[0], *FAR], NEAR[0])
    homeless = [replace(each, host="") for each in NEAR]
    assert not shares_host(homeless, homeless[0])


@pytest.mark.parametrize(
    "change",
    [{"count": 1}, {"rows": ()}, {"sum_s": (1.0,)}, {"sum_s": (1.0, float("nan"))},
     {"slower": (1.0, -1.0)}, {"pace": (1.0, 0.0)}, {"pace": ()},
     {"link": (-1.0, 1e9)}, {"link": (0.0, 0.0)}, {"link": (float("inf"), 1e9)}],
    ids=str,
)  # fmt: skip
def test_a_crowd_that_cannot_be(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"CrowdSpec"):
        replace(TWO, **change)  # type: ignore[arg-type]
