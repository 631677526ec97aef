"""Which of several networks leads to a peer, by what a glance at each takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge.errors import NetworkError
from edge.protocol import fastest_address
from edge.protocol.fastest_address import by_fastest_address, glanced_s
from edge.protocol.peer_info import PeerInfo, describe_peer
from tests.support.null_peers import null_peers
from tests.support.peer_infos import peer_info

SLOW, FAST, ELSEWHERE = "10.9.1.2:5000", "10.9.2.2:5000", "172.17.0.1:5000"


@pytest.fixture(autouse=True)
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"eth0": SLOW, "eth1": FAST}
    monkeypatch.setattr(fastest_address, "dial_order", list)
    monkeypatch.setattr(
        fastest_address,
        "addresses_beside",
        lambda addresses: {name: each for name, each in ways.items() if each in addresses},
    )


@pytest.mark.parametrize(
    ("taken_ms", "reached_at"),
    [
        ({SLOW: 50, FAST: 1}, FAST),
        ({SLOW: 1.4, FAST: 1}, SLOW),  # a glance is rough
        ({FAST: 1}, FAST),
        ({SLOW: 50}, SLOW),
        ({}, SLOW),
    ],
)
def test_the_clearly_faster_network_is_used(taken_ms: Mapping[str, float], reached_at: str) -> None:
    async def measure(_: PeerInfo, address: str) -> float:
        if address not in taken_ms:
            raise NetworkError("nobody answers")
        return taken_ms[address] / 1e3

    peer = peer_info("attic", address=SLOW, addresses=(ELSEWHERE, SLOW, FAST))
    (found,) = asyncio.run(by_fastest_address([peer], measure))
    assert (found.address, found.reached_at) == (reached_at, reached_at)


def test_a_daemon_of_this_device_is_named_in_the_network_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"10.9.1.1:5000": "eth0", "10.9.2.1:5000": "eth1"}
    monkeypatch.setattr(
        fastest_address,
        "own_addresses",
        lambda addresses: {own[each]: each for each in addresses if each in own},
    )

    async def measure(_: PeerInfo, address: str) -> float:
        return {SLOW: 1.0, FAST: 0.1}[address]

    here = peer_info("here", address="10.9.1.1:5000", addresses=tuple(own))
    there = peer_info("there", address=SLOW, addresses=(SLOW, FAST))
    found = asyncio.run(by_fastest_address([here, there], measure))
    assert [peer.reached_at for peer in found] == ["10.9.2.1:5000", FAST]
    assert asyncio.run(by_fastest_address([here], measure)) == [here]


@pytest.mark.parametrize(
    ("address", "addresses"), [(SLOW, (SLOW, ELSEWHERE)), (ELSEWHERE, (ELSEWHERE, SLOW, FAST))]
)
def test_nothing_is_measured_where_there_is_no_choice(
    address: str, addresses: tuple[str, ...]
) -> None:
    """Also of a peer that was reached behind a router, where its own networks may be others."""

    async def measure(*_: object) -> float:
        raise AssertionError

    peer = peer_info("attic", address=address, addresses=addresses)
    assert asyncio.run(by_fastest_address([peer], measure)) == [peer]


def test_a_glance_at_a_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            (address,) = daemon.resources.addresses
            assert 0 < await glanced_s(await describe_peer(address, None), address) < 100

    asyncio.run(scenario())
