"""A peer's record as zeroconf carries it.

Knows the TXT entries, and what of a stranger's entries is believed; sends nothing.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
from zeroconf.asyncio import AsyncServiceInfo

from edge.transport.address import format_address, parse_address
from edge.transport.discovery.peers import PeerRecord
from edge.transport.errors import AddressError

SERVICE_TYPE = "_edge-peer._tcp.local."

_MAX_ENTRY_BYTES = 255
"""A TXT entry's length is one byte (RFC 6763, section 6.1)."""

_PROPERTY = "p."
"""Set before the names of properties, which are free, so that they never hide an own entry."""


def services_of(record: PeerRecord, interfaces: tuple[str, ...]) -> list[AsyncServiceInfo]:
    """The services that announce ``record``: one for each port, since a service has only one.

    An address of all interfaces (0.0.0.0) is announced as the addresses of ``interfaces``.

    Raises:
        ValueError: the record has no address, an address that is not a number, or too long a text.
    """
    entries = _entries(record)
    hosts_of: dict[int, list[str]] = {}
    for address in record.addresses:
        try:
            host, port = parse_address(address)
            is_any = not host or ipaddress.ip_address(host).is_unspecified
        except (ValueError, AddressError) as error:
            raise ValueError(
                f"'{address}' of peer '{record.name}' cannot be announced: write the number of "
                "the interface, not a name"
            ) from error
        hosts_of.setdefault(port, []).extend(interfaces if is_any else [host])
    if not hosts_of:
        raise ValueError(f"peer '{record.name}' has no address to announce: let it listen first")
    digest = hashlib.sha256(f"{record.cluster}\n{record.id}".encode()).hexdigest()[:16]
    return [
        AsyncServiceInfo(
            SERVICE_TYPE,
            f"edge-{digest}-{port}.{SERVICE_TYPE}",
            port=port,
            properties=entries,
            server=f"edge-{digest}-{port}.local.",
            parsed_addresses=list(dict.fromkeys(hosts)),
        )
        for port, hosts in hosts_of.items()
    ]


def record_of(
    properties: Mapping[bytes, bytes | None], hosts: Iterable[str], port: int | None
) -> PeerRecord | None:
    """The record that a stranger announces, or None where it is not one of ours.

    Texts must be printable: they end up on people's terminals.
    """
    try:
        texts = {key.decode(): (value or b"").decode() for key, value in properties.items()}
    except UnicodeDecodeError:
        return None
    peer, cluster, protocol = texts.get("id"), texts.get("cluster"), texts.get("protocol", "")
    addresses = tuple(sorted(format_address(host, port) for host in hosts)) if port else ()
    if not (peer and cluster and addresses and all(text.isprintable() for text in texts.values())):
        return None
    if not (protocol.isascii() and protocol.isdecimal() and 0 < int(protocol) < 1 << 16):
        return None
    return PeerRecord(
        id=peer,
        name=texts.get("name") or peer,
        cluster=cluster,
        addresses=addresses,
        protocol=int(protocol),
        properties={
            key.removeprefix(_PROPERTY): value
            for key, value in sorted(texts.items())
            if key.startswith(_PROPERTY)
        },
    )


def interface_addresses(interfaces: Iterable[str] | None) -> tuple[str, ...]:
    """The IPv4 addresses of ``interfaces``, each a name or an address; of all without any named.

    Loopback counts only where it is named, or where there is nothing else.

    Raises:
        AddressError: this device has no such interface.
    """
    present = {
        name: [entry.address for entry in entries if entry.family.name == "AF_INET"]
        for name, entries in psutil.net_if_addrs().items()
    }
    everything = [address for addresses in present.values() for address in addresses]
    if interfaces is None:
        outside = [one for one in everything if not ipaddress.ip_address(one).is_loopback]
        return tuple(outside or everything)
    chosen: list[str] = []
    for interface in interfaces:
        addresses = present.get(interface) or [one for one in everything if one == interface]
        if not addresses:
            raise AddressError(
                f"this device has no interface '{interface}' with an IPv4 address; it has "
                f"{', '.join(sorted(name for name in present if present[name])) or 'none'}"
            )
        chosen.extend(addresses)
    return tuple(dict.fromkeys(chosen))


def _entries(record: PeerRecord) -> dict[Any, Any]:
    entries = {
        "id": record.id,
        "name": record.name,
        "cluster": record.cluster,
        "protocol": str(record.protocol),
        **{_PROPERTY + key: value for key, value in record.properties.items()},
    }
    for key, value in entries.items():
        size = len(f"{key}={value}".encode())
        if size > _MAX_ENTRY_BYTES:
            raise ValueError(
                f"'{key}' of peer '{record.name}' takes {size} bytes to announce, over the limit "
                f"of {_MAX_ENTRY_BYTES}: shorten it"
            )
        if not key.isascii() or "=" in key or not value.isprintable():
            raise ValueError(
                f"'{key}' of peer '{record.name}' cannot be announced: names are ASCII without "
                "'=', values are printable"
            )
    if not (record.id and record.cluster):
        raise ValueError("a peer needs an id and a cluster to be announced")
    return dict(entries)
