"""Addresses: what a daemon tells of its own, and where neighbours are sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge.cli.commands.pair import _hint
from edge.errors import NetworkError
from edge.host.addresses import has_network, interface_addresses, reachable
from edge.protocol.peer_info import PeerInfo, describe_peer, is_loopback, places
from tests.support.null_peers import null_peers
from tests.support.peer_infos import peer_info

PRESENT = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.168.1.7", "fd00::7"],
    "wlan0": ["10.0.0.7"],
}


@pytest.mark.parametrize(
    ("bound", "interfaces", "told"),
    [
        (["192.168.1.7:5"], None, ["192.168.1.7:5"]),
        (["0.0.0.0:5"], None, ["192.168.1.7:5", "10.0.0.7:5", "127.0.0.1:5"]),
        (["[::]:5"], None, ["[fd00::7]:5", "[::1]:5"]),
        (
            ["0.0.0.0:5", "[::]:5"],
            None,
            ["192.168.1.7:5", "10.0.0.7:5", "[fd00::7]:5", "127.0.0.1:5", "[::1]:5"],
        ),
        (["0.0.0.0:5", "[::]:5"], ["eth0"], ["192.168.1.7:5", "[fd00::7]:5"]),
        (["0.0.0.0:5"], ["10.0.0.7", "lo"], ["10.0.0.7:5", "127.0.0.1:5"]),
        (["127.0.0.1:5", "0.0.0.0:5"], ["lo"], ["127.0.0.1:5"]),
    ],
)
def test_what_a_daemon_tells(
    bound: list[str], interfaces: list[str] | None, told: list[str]
) -> None:
    assert reachable(bound, interfaces=interfaces, present=PRESENT) == tuple(told)


@pytest.mark.parametrize(
    ("present", "has"),
    [
        (PRESENT, True),
        ({"lo": ["127.0.0.1", "::1"], "eth0": ["fd00::7"]}, True),
        ({"lo": ["127.0.0.1", "::1"], "eth0": ["fe80::7%eth0"]}, True),
        ({"lo": ["127.0.0.1"]}, False),
    ],
)
def test_where_zeroconf_works(present: dict[str, list[str]], has: bool) -> None:
    assert has_network(present) is has


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("192.168.1.7:5000", "add --peer 192.168.1.7:5000."),
        ("[fd00::7]:5000", "add --peer '[fd00::7]:5000'."),
        ("[fe80::7%eth0]:5000", "add --peer '[fe80::7%INTERFACE]:5000', with the interface"),
        ("127.0.0.1:5000", "--listen :0"),
    ],
)
def test_the_hint_under_a_pairing_code(place: str, hint: str) -> None:
    assert hint in _hint(place, ["0.0.0.0:5000"])


def test_who_listens_on_loopback_is_told_of_it() -> None:
    assert "add --peer 127.0.0.1:5000." in _hint("127.0.0.1:5000", ["127.0.0.1:5000"])


def test_this_machine_has_interfaces() -> None:
    assert any("127.0.0.1" in addresses for addresses in interface_addresses().values())


def peer(name: str, address: str, *addresses: str) -> PeerInfo:
    return peer_info(name, address=address, addresses=addresses or (address,))


def test_beside_the_coordinator_everybody_is_reached_by_loopback() -> None:
    found = places({(0, 0): peer("a", "127.0.0.1:1"), (1, 0): peer("b", "127.0.0.2:2")})
    assert found[0, 0].addresses == ("127.0.0.1:1",)
    assert found[1, 0].addresses == ("127.0.0.2:2",)
    assert found[1, 0].name == "b"


def test_others_are_told_no_name_but_what_it_stood_for() -> None:
    named = peer_info("a", address="attic.lan:1", reached_at="192.168.1.7:1", addresses=())
    found = places({(0, 0): named, (0, 1): peer("b", "192.168.1.9:2")})
    assert found[0, 0].addresses == ("192.168.1.7:1",)


def test_a_peer_that_is_reached_by_name_is_told_by_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            (at,) = daemon.resources.addresses
            named = at.replace("127.0.0.1", "localhost")
            for address in (at, named):
                found = await describe_peer(address, None)
                assert (found.address, found.reached_at) == (address, at)

    asyncio.run(scenario())


def test_with_one_elsewhere_nobody_is_reached_by_loopback() -> None:
    found = places(
        {
            (0, 0): peer("a", "127.0.0.1:1", "192.168.1.7:1", "10.0.0.7:1", "127.0.0.1:1"),
            (0, 1): peer("b", "192.168.1.9:2", "10.0.0.9:2", "192.168.1.9:2", "127.0.0.1:2"),
        }
    )
    assert found[0, 0].addresses == ("192.168.1.7:1", "10.0.0.7:1")
    assert found[0, 1].addresses == ("192.168.1.9:2", "10.0.0.9:2"), "how we reached it is first"


def test_one_that_listens_on_loopback_only_cannot_have_neighbours_elsewhere() -> None:
    with pytest.raises(NetworkError) as raised:
        places({(0, 0): peer("a", "127.0.0.1:1"), (0, 1): peer("b", "192.168.1.9:2")})
    assert "peer a listens on 127.0.0.1:1 only" in str(raised.value)
    assert "--listen :0" in str(raised.value)


def test_alone_a_loopback_peer_needs_no_neighbours() -> None:
    assert places({(0, 0): peer("a", "127.0.0.1:1")})[0, 0].addresses == ("127.0.0.1:1",)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("192.168.1.1:1", False)],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
