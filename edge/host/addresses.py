"""The addresses to announce, from those that a socket is bound to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

from edge.transport import (
    format_address,
    interfaces_in_order,
    is_link_local,
    parse_address,
    parse_number,
)


def reachable(
    bound: Iterable[str],
    *,
    interfaces: Sequence[str] | None,
    present: Mapping[str, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """`bound`, with 0.0.0.0 and :: replaced by the addresses of the device's interfaces, loopback
    last.

    interfaces: names or addresses of those to use; None: all. present: {name:
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
        found |= {format_address(each, port): None for each in hosts}
    return tuple(sorted(found, key=lambda each: parse_number(each)[0].is_loopback))


def has_network(present: Mapping[str, Sequence[str]] | None = None) -> bool:
    """Whether this device has an address beside loopback: zeroconf searches, and announces, there.
    present: as for `reachable`."""
    known = interface_addresses() if present is None else present
    numbers = [ipaddress.ip_address(each) for addresses in known.values() for each in addresses]
    return any(not number.is_loopback for number in numbers)


def interface_addresses() -> dict[str, list[str]]:
    """{interface: its addresses}, in the order of `interfaces_in_order`. IPv6 link-local ones only
    where an interface has no other."""
    known = psutil.net_if_addrs()
    found = {
        name: [
            entry.address
            for entry in known[name]
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name in interfaces_in_order()
        if name in known
    }
    return {
        name: [each for each in addresses if not is_link_local(each)] or addresses
        for name, addresses in found.items()
    }
