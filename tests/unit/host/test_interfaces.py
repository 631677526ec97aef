"""Which interface leads to an address, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge.host import interfaces
from edge.host.interfaces import interface_to


@pytest.fixture
def one_interface(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, int]:
    """What the system says of the only one, through which everything goes."""
    said = {"speed": 1000, "duplex": int(psutil.NIC_DUPLEX_FULL)}
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"net0": ["127.0.0.1"]})
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {"net0": SimpleNamespace(flags="up,running", **said)}
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
    said = SimpleNamespace(flags="up", **{**one_interface, "speed": speed})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"net0": said})
    found = interface_to("127.0.0.1", root=tmp_path)
    assert found is not None
    assert (found.kind, found.bits_per_s) == ("Ethernet", None)
