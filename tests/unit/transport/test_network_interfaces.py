"""Which of a device's addresses are announced first."""

import errno
from pathlib import Path

import psutil
import pytest

from edge.transport.discovery.zeroconf_record import interface_addresses
from edge.transport.network_interfaces import in_order, interface_states

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
