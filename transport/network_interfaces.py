"""The network interfaces of this device, those first that lead to other devices."""

import contextlib
import ipaddress
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from edge.transport.address import format_address, parse_address

_SYSTEM = Path("/sys/class/net")

_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_TEMPORARY = 0x01
_UNUSABLE = 0x08 | 0x20 | 0x40
"""Flags of Linux: another device has it, deprecated, tentative."""

_MOST_SCOPES = 4
"""Most interfaces on which one link-local address is tried."""

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


def usable_addresses(entries: Iterable[object]) -> list[str]:
    """The addresses of one interface, of psutil's `entries`: IPv4 first, then IPv6 without those
    that the system still checks or no longer uses, the lasting ones first. Of IPv6, no loopback:
    nothing is found there."""
    flags = _ipv6_flags()
    four, six = [], []
    for entry in entries:
        address, family = getattr(entry, "address", ""), getattr(entry, "family", None)
        if family is socket.AF_INET:
            four.append(address)
        elif family is socket.AF_INET6:
            number = ipaddress.IPv6Address(address.partition("%")[0])
            known = flags.get(number, 0)
            if not (number.is_loopback or known & _UNUSABLE):
                six.append((number.is_link_local, known & _TEMPORARY, address))
    return four + [address for *_, address in sorted(six, key=lambda each: each[:2])]


def with_scopes(
    addresses: Iterable[str], scopes: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """`addresses` of another device, host:port, where link-local ones of IPv6 have each interface
    of this device on which they may be: those of `scopes`, {number: interfaces}, or all.

    Such an address has a meaning on one network only, and each device has its own name for it.
    """
    found: dict[str, None] = {}
    for address in addresses:
        host, port = parse_address(address)
        number = host.partition("%")[0]
        if not is_link_local(number):
            found[address] = None
            continue
        for name in (scopes or {}).get(number) or _with_link_local():
            found[format_address(f"{number}%{name}", port)] = None
    return tuple(found)


def is_link_local(host: str) -> bool:
    """Whether this is a link-local number of IPv6, with or without an interface."""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    return number.version == 6 and number.is_link_local


def _with_link_local() -> list[str]:
    """The interfaces with an IPv6 link-local address, in order."""
    known = psutil.net_if_addrs()
    names = [
        name
        for name in interfaces_in_order()
        if any(is_link_local(entry.address) for entry in known.get(name, ()))
    ]
    return names[:_MOST_SCOPES]


def _ipv6_flags() -> dict[ipaddress.IPv6Address, int]:
    """Linux's flags of the IPv6 addresses of this device; empty on other systems."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in _IPV6_ADDRESSES.read_text().splitlines())
        return {
            ipaddress.IPv6Address(bytes.fromhex(words[0])): int(words[4], 16) for words in lines
        }
    return {}


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
