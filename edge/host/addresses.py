"""The addresses to announce, from those that a socket is bound to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

from edge.transport import format_address, interfaces_in_order, parse_address


def reachable(
    bound: Iterable[str],
    *,
    interfaces: Sequence[str] | None,
    present: Mapping[str, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """`bound`, with 0.0.0.0 and :: replaced by the addresses of the device's interfaces.

    interfaces: names or addresses of those to use; None: all, loopback last. present: {name:
    addresses} of the device's interfaces; None: read from the system.
    """
    known = interface_addresses() if present is None else present
    found: dict[str, None] = {}
    for address in bound:
        host, port = parse_address(address)
        number = ipaddress.ip_address(host) if host else ipaddress.IPv4Address(0)
        if not number.is_unspecified:
            found[address] = None
            continue
        hosts = [
            each
            for name, addresses in known.items()
            for each in addresses
            if interfaces is None or name in interfaces or each in interfaces
            if ipaddress.ip_address(each).version == number.version
        ]
        for each in sorted(hosts, key=lambda host: ipaddress.ip_address(host).is_loopback):
            found[format_address(each, port)] = None
    return tuple(found)


def has_ipv4_network(present: Mapping[str, Sequence[str]] | None = None) -> bool:
    """Whether this device has an IPv4 address beside loopback: zeroconf searches, and announces,
    there alone. present: as for `reachable`."""
    known = interface_addresses() if present is None else present
    numbers = [ipaddress.ip_address(each) for addresses in known.values() for each in addresses]
    return any(number.version == 4 and not number.is_loopback for number in numbers)


def interface_addresses() -> dict[str, list[str]]:
    """{interface: its addresses}, without scoped IPv6 addresses, in the order of
    `interfaces_in_order`."""
    known = psutil.net_if_addrs()
    return {
        name: [
            entry.address
            for entry in known[name]
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
        ]
        for name in interfaces_in_order()
        if name in known
    }
