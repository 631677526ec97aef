"""Which interface leads to an address, and what it is."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge.host import interfaces
from edge.host.interfaces import dial_order, interface_to, interfaces_beside, own_addresses


@pytest.fixture
def one_interface(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, int]:
    """What the system says of the only one, through which everything goes."""
    said = {"speed": 1000, "duplex": int(psutil.NIC_DUPLEX_FULL)}
    network = ipaddress.ip_network("127.0.0.0/8")
    monkeypatch.setattr(interfaces, "_networks", lambda: {"127.0.0.1": ("net0", network)})
    monkeypatch.setattr(
        psutil,
        "net_if_stats",
        lambda: {"net0": SimpleNamespace(isup=True, flags="up,running", **said)},
    )
    return said


def test_what_leads_to_this_machine_is_loopback() -> None:
    found = interface_to("127.0.0.1")
    assert found is not None
    assert (found.kind, found.bits_per_s) == ("loopback", None)
    assert interface_to("no-such-host.invalid") is None


@pytest.mark.parametrize(
    ("folder", "kind", "bits_per_s"),
    [("device", "Ethernet", 10**9), ("wireless", "Wi-Fi", None), ("bridge", "virtual", None)],
)
def test_kinds(
    folder: str, kind: str, bits_per_s: int | None, tmp_path: Path,
    one_interface: Mapping[str, int],
) -> None:  # fmt: skip
    (tmp_path / "net0" / folder).mkdir(parents=True)
    found = interface_to("127.0.0.1", root=tmp_path)
    assert found is not None
    assert (found.name, found.kind, found.bits_per_s) == ("net0", kind, bits_per_s)
    assert not found.is_half_duplex


@pytest.mark.parametrize("speed", [0, 65535])
def test_a_speed_that_the_driver_does_not_know(
    speed: int, tmp_path: Path, one_interface: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net0" / "device").mkdir(parents=True)
    said = SimpleNamespace(isup=True, flags="up", **{**one_interface, "speed": speed})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"net0": said})
    found = interface_to("127.0.0.1", root=tmp_path)
    assert found is not None
    assert (found.kind, found.bits_per_s) == ("Ethernet", None)


NETWORKS = {
    "docker0": ("172.17.0.1", "255.255.0.0"),
    "wlan0": ("192.168.1.7", "255.255.255.0"),
    "eth0": ("10.0.0.7", "255.255.255.0"),
    "br0": ("10.0.1.7", "255.255.255.0"),
    "tun0": ("100.64.0.7", "255.192.0.0"),
    "thunderbolt0": ("10.0.2.7", "255.255.255.0"),
}


@pytest.mark.parametrize(
    ("announced", "order"),
    [
        (["172.17.0.1:5", "192.168.1.8:5"], [1, 0]),  # this device has the first one itself
        (["192.168.1.8:5", "10.0.0.8:5"], [1, 0]),  # Wi-Fi, a cable
        (["172.18.0.1:5", "192.168.1.8:5"], [1, 0]),  # behind a router, in a network of both
        (["100.64.0.8:5", "192.168.1.8:5"], [1, 0]),  # a tunnel
        (["192.168.1.8:5", "10.0.1.8:5"], [1, 0]),  # a bridge over a cable
        (["100.64.0.8:5", "10.0.1.8:5", "10.0.0.8:5"], [2, 1, 0]),
        (["[fd00::8]:5", "192.168.1.8:5"], [1, 0]),  # no route
        (["10.0.0.8:5", "10.0.2.8:5"], [1, 0]),  # a cable of 2.5 Gbit/s, one of Thunderbolt
        (["127.0.0.1:5", "127.0.0.1:4"], [0, 1]),
        (["attic:5", "10.0.0.8:5"], [1, 0]),
    ],
)
def test_addresses_are_tried_by_what_leads_there(
    announced: list[str], order: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "eth0/device",
        "wlan0/device",
        "wlan0/wireless",
        "br0/lower_eth1",
        "eth1/device",
        "thunderbolt0/device",
    ):
        (tmp_path / name).mkdir(parents=True)
    present = {
        name: [SimpleNamespace(family=socket.AF_INET, address=own, netmask=mask)]
        for name, (own, mask) in NETWORKS.items()
    }
    speeds = {"eth0": 2500, "eth1": 1000}
    said = {
        name: SimpleNamespace(isup=True, flags="up", speed=speeds.get(name, 0), duplex=0)
        for name in (*NETWORKS, "eth1")
    }

    def source(host: str) -> str | None:
        if ":" in host:
            return None
        begins = host.rpartition(".")[0]
        return next((own for own, _ in NETWORKS.values() if own.startswith(begins)), "10.0.0.7")

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: present)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: said)
    monkeypatch.setattr(interfaces, "_source", source)
    assert dial_order(announced, root=tmp_path) == [announced[each] for each in order]


def test_interfaces_in_a_network_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(family=socket.AF_INET, address="127.0.0.2", netmask="255.255.255.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [own]})
    monkeypatch.setattr(interfaces, "_source", lambda _: "127.0.0.2")
    addresses = ("127.0.0.9:5", "127.0.0.8:5", "127.0.0.2:5", "10.0.0.7:5", "attic:5")
    assert [each.name for each in interfaces_beside(addresses)] == ["lo"]
    assert interfaces_beside(addresses[2:]) == []
    assert own_addresses(addresses) == {"lo": "127.0.0.2:5"}
