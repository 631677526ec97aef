"""The network interfaces of this device, those first that lead to other devices."""

import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

_SYSTEM = Path("/sys/class/net")

_ELSEWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of documentation (RFC 5737, RFC 3849): the way there is the default route."""


def interfaces_in_order() -> list[str]:
    """Names of all interfaces; see `in_order`."""
    present = {
        name: [entry.address for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
    }
    flags = {name: state.flags.split(",") for name, state in psutil.net_if_stats().items()}
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
