"""Whether copies of a model answer more than one plan does, by what is predicted of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edge.errors import CapacityError
from edge.partition import ClusterSpec, Workload, choose
from edge.planning.copies import (
    CopiesForecast,
    LoadSeen,
    Way,
    copy_proposals,
    forecast_copies,
    together_tokens_per_s,
    tokens_per_s,
)
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from tests.support.peer_infos import peer_info
from tests.unit.partition.test_choose import CABLE, SMALL, cluster

LIMITS = StepLimits(context_tokens=4096, chunk_tokens=256, requests=64, cached_tokens=4096)


def proposed(devices: ClusterSpec, context_tokens: int = 4096) -> Proposal:
    workload = Workload()
    return Proposal(
        choice=choose(SMALL, devices, workload),
        model=SMALL,
        cluster=devices,
        workload=workload,
        limits=replace(LIMITS, context_tokens=context_tokens),
        wire_rules=WireRules(sums=(), hops=()),
        dtype="int4",
        weights="int4",
    )


def alone(devices: ClusterSpec) -> list[Proposal]:
    ids = [device.id for device in devices.devices]
    return [proposed(devices.without(*(id for id in ids if id != own))) for own in ids]


def forecast(devices: ClusterSpec, requests: int) -> CopiesForecast:
    found = forecast_copies(proposed(devices), alone(devices), requests)
    assert found is not None
    return found


def test_one_request_is_fastest_on_all_devices_and_many_on_copies() -> None:
    fast = cluster((4, 30e9), (4, 30e9), link=CABLE)
    assert forecast(fast, 1).way() == "one"
    slow = cluster((4, 30e9), (4, 30e9), link=(5e-3, 10e6))
    found = forecast(slow, 8)
    assert found.way() == "copies"
    assert found.copies_tokens_per_s == pytest.approx(2 * tokens_per_s(alone(slow)[0], slow, 4))
    assert found.in_words().startswith("at 8 requests at once, 2 copies (a; b) make ")


def test_unlike_copies_get_requests_by_their_speed() -> None:
    devices = cluster((4, 30e9), (4, 10e9))
    fast, slow = alone(devices)
    expected = tokens_per_s(fast, fast.cluster, 3) + tokens_per_s(slow, slow.cluster, 1)
    assert together_tokens_per_s([fast, slow], 4) == pytest.approx(expected)
    assert together_tokens_per_s([fast, slow], 1) == tokens_per_s(fast, fast.cluster, 1)


def test_copies_on_one_host_share_its_memory() -> None:
    apart, together = cluster((4, 30e9), (4, 30e9)), cluster((4, 30e9), (4, 30e9), host="desk")
    ratio = together_tokens_per_s(alone(apart), 8) / together_tokens_per_s(alone(together), 8)
    assert 1.7 < ratio <= 2.0


@pytest.mark.parametrize(
    ("now", "one", "copies", "then"),
    [
        ("one", 100, 109, "one"),
        ("one", 100, 111, "copies"),
        ("copies", 109, 100, "copies"),
        ("copies", 111, 100, "one"),
        ("copies", 100, 100, "copies"),
    ],
)
def test_neither_is_left_for_a_small_gain(now: Way, one: float, copies: float, then: Way) -> None:
    found = CopiesForecast(
        requests=4, one_tokens_per_s=one, copies_tokens_per_s=copies, devices=(("a",), ("b",))
    )
    assert found.way(now) == then


def test_nothing_is_predicted_of_one_copy_or_without_rates() -> None:
    devices = cluster((4, 30e9), (4, 30e9))
    first, second = alone(devices)
    assert forecast_copies(first, [first], 8) is None
    unknown = replace(second, choice=replace(second.choice, predicted=None))
    assert forecast_copies(first, [first, unknown], 8) is None


@pytest.mark.parametrize(
    ("gib", "most", "copies"),
    [
        ((4, 4, 4), 64, [("00",), ("01",), ("02",)]),
        ((4, 4, 4), 2, [("00",), ("01",)]),
        ((4, 0.6, 0.6), 64, [("00",), ("01", "02")]),
        ((4, 0.6, 0.6), 1, [("00",)]),
        ((4, 0.1, 0.1), 64, [("00",)]),
        ((0.1, 0.1, 0.1), 64, []),
    ],
    ids=["three", "at most two", "two share one", "one is enough", "too small", "none"],
)
def test_devices_that_hold_the_model_and_the_others_together(
    gib: Sequence[float], most: int, copies: list[tuple[str, ...]]
) -> None:
    devices = cluster(*((each, 30e9) for each in gib))
    peers = [replace(peer_info(device.name), id=device.id) for device in devices.devices]

    async def propose(peers: Sequence[PeerInfo], options: LoadOptions) -> Proposal:
        assert (options.stream, options.replan, options.wants_copies) == ("off", "off", False)
        ids = {peer.id for peer in peers}
        part = devices.without(*(each.id for each in devices.devices if each.id not in ids))
        context = options.context_tokens or 4096 // len(peers)
        try:
            return proposed(part, context)
        except Exception as error:
            raise CapacityError(str(error)) from error

    found = asyncio.run(
        copy_proposals(propose, peers, LoadOptions(copies="auto"), most=most, known=devices)
    )
    assert [tuple(sorted(each.plan.devices)) for each in found] == copies
    assert len({each.context_tokens for each in found}) <= 1, "all have the same context"


def test_the_load_is_the_mean_of_busy_looks_over_whole_windows() -> None:
    seen = LoadSeen(window=4)
    looks = [0, 0, 0, 0, 3, 0, 4, 0, 1]
    assert [seen.look(each) for each in looks] == [None] * 3 + [0] + [None] * 3 + [4, None]
