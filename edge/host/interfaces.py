"""The network interfaces of this machine, and the route to an address."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from edge.transport import AddressError, interface_states, parse_number

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

InterfaceKind = Literal["Ethernet", "Wi-Fi", "loopback", "virtual"]

_SYSTEM = Path("/sys/class/net")
_UNKNOWN_MBITS = 65535
"""Drivers' values for an unknown speed."""


_USUAL_BITS_PER_S: dict[InterfaceKind, float] = {
    "loopback": 10e9,
    "Ethernet": 1e9,
    "Wi-Fi": 300e6,
    "virtual": 50e6,
}
"""Rates of interfaces without a negotiated speed. A virtual one may be a tunnel through the
Internet, and what is behind a bridge of this machine has no faster address."""


_THUNDERBOLT_BITS_PER_S = 10e9
"""The rate of a network by a Thunderbolt or USB4 cable."""


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
    way = _networks().get(_source(host))
    return None if way is None else _described(way[0], root)


def dial_order(addresses: Iterable[str], *, root: Path = _SYSTEM) -> list[str]:
    """`addresses` of one other device, host:port, in the order in which to try them.

    First those in a network of this device, by the rate of its interface there, then those behind a
    router, then those without a route. Addresses that this device has itself are last: the other
    device may be one with the same address, as of a bridge of containers. Equals stay in order.
    """
    tried = list(addresses)
    if len(tried) < 2:
        return tried
    networks = _networks()

    @functools.cache
    def rate(name: str) -> float:
        interface = _described(name, root)
        return 0.0 if interface is None else _expected_bits_per_s(interface, root)

    def rank(address: str) -> tuple[bool, bool, bool, float]:
        try:
            number = parse_number(address)[0]
        except AddressError:  # a name, which is not looked up for this
            return False, False, True, 0.0
        source = _source(str(number))
        if source not in networks:
            return number.is_loopback, True, True, 0.0
        name, network = networks[source]
        is_own = _unscoped(str(number)) in networks or number.is_loopback
        return is_own, False, number not in network, -rate(name)

    return sorted(tried, key=rank)


def addresses_beside(addresses: Iterable[str]) -> dict[str, str]:
    """The first of `addresses` of another device, host:port, in a network of each of this device's
    interfaces, by the interface's name."""
    networks = _networks()
    found: dict[str, str] = {}
    for address in addresses:
        with contextlib.suppress(AddressError):
            number = parse_number(address)[0]
            way = networks.get(_source(str(number)))
            if way is not None and number in way[1] and _unscoped(str(number)) not in networks:
                found.setdefault(way[0], address)
    return found


def own_addresses(addresses: Iterable[str]) -> dict[str, str]:
    """The first of `addresses`, host:port, that each interface of this device has itself, by the
    interface's name."""
    networks = _networks()
    found: dict[str, str] = {}
    for address in addresses:
        with contextlib.suppress(AddressError):
            number = _unscoped(str(parse_number(address)[0]))
            if number in networks:
                found.setdefault(networks[number][0], address)
    return found


def interfaces_beside(addresses: Iterable[str]) -> list[Interface]:
    """This device's interfaces in networks of these addresses of another device, host:port."""
    names = addresses_beside(addresses)
    return [found for name in names if (found := _described(name, _SYSTEM)) is not None]


def _unscoped(host: str) -> str:
    return host.partition("%")[0]


def _source(host: str) -> str:
    """This device's address for packets to `host`, without an interface; empty: no route."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(where)  # only chooses a route
            return _unscoped(str(unsent.getsockname()[0]))
    except OSError:
        return ""


def _networks() -> dict[str, tuple[str, IPNetwork]]:
    """The interface and the network of each address of this device."""
    return {
        own: (name, ipaddress.ip_network(f"{own}/{_prefix_bits(entry.netmask)}", strict=False))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask
        for own in [_unscoped(entry.address)]
    }


def _prefix_bits(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()


def _expected_bits_per_s(interface: Interface, root: Path) -> float:
    """The negotiated rate, or a usual one of such an interface. A bridge or VLAN has that of the
    interface below it."""
    if interface.kind == "virtual":
        names = [
            each.name.removeprefix("lower_") for each in (root / interface.name).glob("lower_*")
        ]
        below = [found for name in names if (found := _described(name, root)) is not None]
        rates = (_expected_bits_per_s(each, root) for each in below)
        return max(rates, default=_USUAL_BITS_PER_S["virtual"])
    usual = _USUAL_BITS_PER_S[interface.kind]
    if interface.name.startswith("thunderbolt"):  # its driver need not tell a speed
        usual = _THUNDERBOLT_BITS_PER_S
    return interface.bits_per_s or usual


def _described(name: str, root: Path) -> Interface | None:
    state = interface_states().get(name)
    if state is None:
        return None
    folder = root / name
    kind: InterfaceKind = "virtual"
    if "loopback" in state.flags:
        kind = "loopback"
    elif (folder / "wireless").exists() or (folder / "phy80211").exists():
        kind = "Wi-Fi"
    elif (folder / "device").exists():
        kind = "Ethernet"
    is_known = kind == "Ethernet" and 0 < state.speed_mbits < _UNKNOWN_MBITS
    return Interface(
        name=name,
        kind=kind,
        bits_per_s=state.speed_mbits * 10**6 if is_known else None,
        is_half_duplex=kind == "Ethernet" and state.is_half_duplex,
    )
