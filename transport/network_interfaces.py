"""The network interfaces of this device, those first that lead to other devices."""

import contextlib
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SYSTEM = Path("/sys/class/net")

_ELSEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of documentation (RFC 5737, RFC 3849): the way there is the default route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceState:
    """What the system says of a network interface."""

    is_up: bool
    flags: frozenset[str]
    """As Linux names them, such as loopback and pointopoint."""
    speed_mbits: int = 0
    """0: not known."""
    is_half_duplex: bool = False


def interface_states() -> dict[str, InterfaceState]:
    """The interfaces by name.

    Some kernels and emulators tell no speed of an interface, and then psutil tells nothing of any:
    each counts as up, and loopback is known by its address.
    """
    try:
        states = psutil.net_if_stats()
    except OSError:
        return {
            name: InterfaceState(is_up=True, flags=_usual_flags(entry.address for entry in entries))
            for name, entries in psutil.net_if_addrs().items()
        }
    return {
        name: InterfaceState(
            is_up=state.isup,
            flags=frozenset(state.flags.split(",")),
            speed_mbits=state.speed,
            is_half_duplex=state.duplex == psutil.NIC_DUPLEX_HALF,
        )
        for name, state in states.items()
    }


def _usual_flags(addresses: Iterable[str]) -> frozenset[str]:
    is_loopback = any(each == "::1" or each.startswith("127.") for each in addresses)
    return frozenset({"up", "running", *(["loopback"] if is_loopback else [])})


def interfaces_in_order() -> list[str]:
    """Names of all interfaces; see `in_order`."""
    present = {
        name: [entry.address for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
    }
    flags = {name: state.flags for name, state in interface_states().items()}
    return in_order(present, flags, _default_sources())


def in_order(
    present: Mapping[str, Sequence[str]],
    flags: Mapping[str, Collection[str]],
    sources: Collection[str],
    root: Path = _SYSTEM,
) -> list[str]:
    """The interfaces of `present`, {name: addresses}: first that of the default route, then those
    with a carrier, of these hardware, then others, then bridges with no hardware in them, as of
    containers. Loopback is last. `sources`: addresses used on the default route."""

    def rank(name: str) -> tuple[bool, bool, bool, bool, bool]:
        is_hardware = any(
            (folder / "device").exists() for folder in (root / name, *(root / name).glob("lower_*"))
        )
        return (
            "loopback" in flags.get(name, ()),
            set(sources).isdisjoint(present[name]),
            "running" not in flags.get(name, ()),
            not is_hardware and (root / name / "bridge").exists(),
            not is_hardware,
        )

    return sorted(present, key=rank)


def _default_sources() -> list[str]:
    """The addresses of this device on its default routes."""
    found = []
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect((elsewhere, 9))  # only chooses a route
            found.append(str(unsent.getsockname()[0]))
    return found
