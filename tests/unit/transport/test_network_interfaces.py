"""Which of a device's addresses are announced first."""

import errno
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge.transport import network_interfaces
from edge.transport.discovery import zeroconf_record
from edge.transport.discovery.zeroconf_record import interface_addresses, multicast_places
from edge.transport.network_interfaces import (
    in_order,
    interface_states,
    usable_addresses,
    with_scopes,
)

PRESENT = {
    "lo": ["127.0.0.1"],
    "br-1": ["172.21.0.1"],
    "veth0": ["10.9.0.7"],
    "eth0": ["192.168.1.7"],
    "eth1": ["192.168.2.7"],
    "br-lan": ["192.168.3.7"],
}
WITH_CARRIER = dict.fromkeys(PRESENT, ("up", "running"))


@pytest.mark.parametrize(
    ("sources", "without", "order"),
    [
        ([], "", "eth0 eth1 br-lan veth0 br-1 lo"),
        ([], "eth0", "eth1 br-lan veth0 br-1 eth0 lo"),
        (["192.168.2.7"], "", "eth1 eth0 br-lan veth0 br-1 lo"),
        (["10.9.0.7"], "", "veth0 eth0 eth1 br-lan br-1 lo"),
    ],
)
def test_addresses_that_lead_to_other_devices_are_first(
    sources: list[str], without: str, order: str, tmp_path: Path
) -> None:
    for name in ("eth0/device", "eth1/device", "br-1/bridge", "br-lan/bridge"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "br-lan/lower_eth2/device").mkdir(parents=True)
    flags: dict[str, tuple[str, ...]] = {
        name: said for name, said in WITH_CARRIER.items() if name != without
    }
    flags["lo"] = ("up", "loopback", "running")
    assert " ".join(in_order(PRESENT, flags, sources, tmp_path)) == order


def test_a_system_that_tells_no_speeds_has_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels and emulators answer so for one interface, and psutil then for all."""
    before = interface_addresses(None)

    def no_ioctl() -> None:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr(psutil, "net_if_stats", no_ioctl)
    states = interface_states()
    assert states.keys() == psutil.net_if_addrs().keys()
    assert all(each.is_up and each.speed_mbits == 0 for each in states.values())
    assert "loopback" in states["lo"].flags
    assert set(interface_addresses(None)) == set(before)


def entries(*addresses: str) -> list[SimpleNamespace]:
    """What psutil says of these addresses of one interface."""
    return [
        SimpleNamespace(address=each, family=socket.AF_INET6 if ":" in each else socket.AF_INET)
        for each in addresses
    ]


@pytest.fixture
def two_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable with both versions of IP, and a radio with link-local addresses alone."""
    has = {
        "lo": entries("127.0.0.1", "::1"),
        "cable": entries("fd00::9", "fe80::1%cable", "fd00::1", "fd00::5", "fd00::6", "10.0.0.1"),
        "radio": entries("fe80::2%radio"),
    }
    flags = tmp_path / "if_inet6"
    flags.write_text(
        f"fd{'0' * 29}9 02 40 00 01 cable\n"  # temporary
        f"fd{'0' * 29}5 02 40 00 40 cable\n"  # tentative
        f"fd{'0' * 29}6 02 40 00 20 cable\n"  # deprecated
        f"fd{'0' * 29}1 02 40 00 80 cable\n"
    )
    monkeypatch.setattr(network_interfaces, "_IPV6_ADDRESSES", flags)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: has)
    monkeypatch.setattr(zeroconf_record, "interfaces_in_order", lambda: ["cable", "radio", "lo"])
    monkeypatch.setattr(network_interfaces, "interfaces_in_order", lambda: ["cable", "radio", "lo"])
    monkeypatch.setattr(zeroconf_record, "interface_states", dict)
    numbers = {"cable": 2, "radio": 3}
    monkeypatch.setattr(socket, "if_nametoindex", numbers.__getitem__)


@pytest.mark.usefixtures("two_networks")
def test_ipv6_addresses_are_announced_after_those_that_more_devices_reach() -> None:
    everything = ("10.0.0.1", "fd00::1", "fe80::1%cable", "fe80::2%radio", "fd00::9")
    assert interface_addresses(None) == everything
    assert interface_addresses(["radio"]) == ("fe80::2%radio",)
    assert interface_addresses(["fe80::2"]) == ("fe80::2%radio",)
    assert interface_addresses(["lo"]) == ("127.0.0.1",)
    assert multicast_places(everything) == ["10.0.0.1", 2, 3]


@pytest.mark.usefixtures("two_networks")
def test_a_link_local_address_gets_the_interfaces_of_the_device_that_dials() -> None:
    """What another device calls its own interface says nothing here."""
    told = ["10.0.0.9:7", "[fe80::9]:7", "[fe80::9%eth5]:7", "host:7"]
    everywhere = ("10.0.0.9:7", "[fe80::9%cable]:7", "[fe80::9%radio]:7", "host:7")
    assert with_scopes(told) == everywhere
    assert with_scopes(told, {"fe80::9": ["radio"]}) == (
        "10.0.0.9:7",
        "[fe80::9%radio]:7",
        "host:7",
    )


def test_an_address_that_the_system_does_not_describe_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_interfaces, "_IPV6_ADDRESSES", tmp_path / "none")
    assert usable_addresses(entries("fd00::9", "10.0.0.1")) == ["10.0.0.1", "fd00::9"]
