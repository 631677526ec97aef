"""The network interfaces of this machine, and the route to an address."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from edge.host.addresses import interface_addresses

InterfaceKind = Literal["Ethernet", "Wi-Fi", "loopback", "virtual"]

_SYSTEM = Path("/sys/class/net")
_UNKNOWN_MBITS = 65535
"""Drivers' values for an unknown speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface, as the system describes it."""

    name: str
    kind: InterfaceKind
    bits_per_s: int | None
    """The negotiated speed of its cable; None: not known, or no cable."""
    is_half_duplex: bool = False


def interface_to(host: str, *, root: Path = _SYSTEM) -> Interface | None:
    """The interface for packets to this address; None: not known."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(where)  # only chooses a route
            own = unsent.getsockname()[0]
    except OSError:
        return None
    name = next((name for name, each in interface_addresses().items() if own in each), None)
    return None if name is None else _described(name, root)


def _described(name: str, root: Path) -> Interface | None:
    state = psutil.net_if_stats().get(name)
    if state is None:
        return None
    folder = root / name
    kind: InterfaceKind = "virtual"
    if "loopback" in state.flags.split(","):
        kind = "loopback"
    elif (folder / "wireless").exists() or (folder / "phy80211").exists():
        kind = "Wi-Fi"
    elif (folder / "device").exists():
        kind = "Ethernet"
    is_known = kind == "Ethernet" and 0 < state.speed < _UNKNOWN_MBITS
    return Interface(
        name=name,
        kind=kind,
        bits_per_s=state.speed * 10**6 if is_known else None,
        is_half_duplex=kind == "Ethernet" and state.duplex == psutil.NIC_DUPLEX_HALF,
    )
