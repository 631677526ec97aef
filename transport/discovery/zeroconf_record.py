"""Encoding of a peer's record as zeroconf services.

Knows the TXT entries, and which of a stranger's entries to trust; sends nothing.

A service is a name, an address, a port and TXT entries. Anyone on the network can announce one, and
copy another's entries with different addresses. So a record is made of the entries alone: its
addresses are among them, and with a key, a tag covers all of them and the service's name. The
service's own address and port are for other programs.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence

import psutil
from zeroconf.asyncio import AsyncServiceInfo

from edge.transport.address import IPAddress, format_address, parse_address, parse_number
from edge.transport.discovery.peers import MAX_ADDRESSES, PeerRecord
from edge.transport.errors import AddressError
from edge.transport.network_interfaces import (
    interface_states,
    interfaces_in_order,
    is_link_local,
    usable_addresses,
)

SERVICE_TYPE = "_edge-peer._tcp.local."

_MAX_ENTRY_BYTES = 255
"""A TXT entry's length is one byte (RFC 6763, section 6.1)."""

_PROPERTY = "p."
"""Prefix of property names, which are free, so that they never hide Edge's own entries."""

_AT = "at."
"""Prefix of an address's number."""

_TAG_HEX = 32


def services_of(
    record: PeerRecord, interfaces: tuple[str, ...], key: bytes | None
) -> list[AsyncServiceInfo]:
    """The services that announce ``record``: one for each port, since a service has only one.

    A wildcard address (0.0.0.0, ::) is announced as the addresses of ``interfaces`` of its kind. Of
    each port, the first MAX_ADDRESSES addresses are announced, link-local ones without the
    interface, whose name is this device's. With a ``key``, the cluster is announced as a tag
    that only holders of the key can make and recognise.

    Raises:
        ValueError: the record has no address, one that others cannot dial, or too long a text.
    """
    hosts_of: dict[int, dict[str, None]] = {}
    everywhere: dict[int, set[int]] = {}
    for address in record.addresses:
        host, port, versions = _parsed(record, address)
        hosts_of.setdefault(port, {}).update({} if versions else {host: None})
        everywhere.setdefault(port, set()).update(versions)
    for host in (each.partition("%")[0] for each in interfaces):
        for port, wanted in everywhere.items():
            if ipaddress.ip_address(host).version in wanted:
                hosts_of[port][host] = None
    if not hosts_of:
        raise ValueError(f"peer '{record.name}' has no address to announce: let it listen first")
    return [
        _service(record, port, tuple(hosts)[:MAX_ADDRESSES], key)
        for port, hosts in hosts_of.items()
    ]


def record_of(
    service: str, properties: Mapping[bytes, bytes | None], cluster: str, key: bytes | None
) -> PeerRecord | None:
    """The record of the service with this name. None if it is no peer of the cluster.

    Texts must be printable, as they reach terminals. Addresses must be numeric, so that no name
    server is asked. Link-local ones have no interface yet.
    """
    try:
        texts = {name.decode(): (value or b"").decode() for name, value in properties.items()}
    except UnicodeDecodeError:
        return None
    told, peer, protocol = (texts.pop(name, "") for name in ("cluster", "id", "protocol"))
    entries = {**texts, "id": peer, "protocol": protocol}
    if not hmac.compare_digest(told.encode(), _told_cluster(service, entries, cluster, key)):
        return None
    numbered = sorted((len(name), name) for name in texts if name.startswith(_AT))
    addresses = [texts[name] for _, name in numbered]
    if not (peer and all(text.isprintable() for text in (told, *entries, *entries.values()))):
        return None
    if not (0 < len(addresses) <= MAX_ADDRESSES and all(map(_is_dialable, addresses))):
        return None
    if not (protocol.isascii() and protocol.isdecimal() and 0 < int(protocol) < 1 << 16):
        return None
    return PeerRecord(
        id=peer,
        name=texts.get("name") or peer,
        cluster=cluster,
        addresses=tuple(addresses),
        protocol=int(protocol),
        properties={
            name.removeprefix(_PROPERTY): value
            for name, value in sorted(texts.items())
            if name.startswith(_PROPERTY)
        },
    )


def interface_addresses(interfaces: Iterable[str] | None) -> tuple[str, ...]:
    """The present addresses of ``interfaces``, chosen as by `addresses_of`, in the order of
    `interfaces_in_order`: of each those of IPv4 and one of IPv6, then the link-local ones of all,
    then their others."""
    known = psutil.net_if_addrs()
    present = {
        name: usable_addresses(known[name]) for name in interfaces_in_order() if name in known
    }
    tunnels = {name for name, state in interface_states().items() if "pointopoint" in state.flags}
    firsts = {next((each for each in found if ":" in each), "") for found in present.values()}

    def rank(address: str) -> int:
        return 1 if is_link_local(address) else 2 if ":" in address and address not in firsts else 0

    return tuple(sorted(addresses_of(interfaces, present, tunnels), key=rank))


def multicast_places(addresses: Iterable[str]) -> list[str | int]:
    """Where zeroconf sends and listens for these own addresses: IPv4 ones as they are, and the
    numbers of the interfaces that have the IPv6 ones."""
    places: dict[str | int, None] = {}
    known = psutil.net_if_addrs()
    for address in addresses:
        if ":" not in address:
            places[address] = None
            continue
        for name, entries in known.items():
            if any(entry.address == address for entry in entries):
                with contextlib.suppress(OSError):  # it has just gone
                    places[socket.if_nametoindex(name)] = None
    return list(places)


def addresses_of(
    interfaces: Iterable[str] | None,
    present: Mapping[str, Sequence[str]],
    tunnels: Collection[str],
) -> tuple[str, ...]:
    """The addresses of ``interfaces`` (names or addresses) among ``present``; all if none is named.

    Tunnels and loopback count only if named, or if there is nothing else. A tunnel's address, as of
    a VPN, stays the same in every network, so strangers could track the device by it. Most tunnels
    do not carry multicast either.

    Raises:
        AddressError: this device has no such interface.
    """
    everything = [address for addresses in present.values() for address in addresses]
    if interfaces is None:
        outside = [one for one in everything if not ipaddress.ip_address(one).is_loopback]
        hidden = {address for name in tunnels for address in present.get(name, ())}
        return tuple([one for one in outside if one not in hidden] or outside or everything)
    chosen: list[str] = []
    for interface in interfaces:
        addresses = present.get(interface) or [
            one for one in everything if interface in (one, one.partition("%")[0])
        ]
        if not addresses:
            raise AddressError(
                f"this device has no interface '{interface}' with an address; it has "
                f"{', '.join(sorted(name for name in present if present[name])) or 'none'}"
            )
        chosen.extend(addresses)
    return tuple(dict.fromkeys(chosen))


def _parsed(record: PeerRecord, address: str) -> tuple[str, int, tuple[int, ...]]:
    """Host without interface, and port; and the versions of IP whose wildcard address it is."""
    try:
        host, port = parse_address(address)
        if not host:
            return host, port, (4, 6)
        number = ipaddress.ip_address(host)
        if number.version == 6 and number.is_link_local:
            number = ipaddress.ip_address(host.partition("%")[0])
    except (ValueError, AddressError) as error:
        raise ValueError(
            f"'{address}' of peer '{record.name}' cannot be announced: write the number of the "
            "interface, not a name"
        ) from error
    if not (number.is_unspecified or _leads_somewhere(number)):
        raise ValueError(
            f"'{address}' of peer '{record.name}' cannot be announced: it leads nowhere from "
            "another device; listen on another address, or do not announce"
        )
    return str(number), port, (number.version,) if number.is_unspecified else ()


def _is_dialable(address: str) -> bool:
    try:
        number, port = parse_number(address)
    except AddressError:
        return False
    return port > 0 and _leads_somewhere(number)


def _leads_somewhere(number: IPAddress) -> bool:
    """Whether another device can connect to it. The interface of an IPv6 link-local address is
    named differently by each device."""
    if number.version == 6 and number.scope_id is not None:
        return False
    return not (number.is_unspecified or number.is_multicast)


def _service(
    record: PeerRecord, port: int, hosts: Sequence[str], key: bytes | None
) -> AsyncServiceInfo:
    named = f"{record.cluster}\n{record.id}".encode()
    if key is None:
        digest = hashlib.sha256(named).hexdigest()[:16]
    else:  # a plain hash of the cluster's name could be guessed
        digest = hmac.digest(key, b"edge is announced as " + named, hashlib.sha256).hex()[:16]
    instance = f"edge-{digest}-{port}"
    service = f"{instance}.{SERVICE_TYPE}"
    entries = {
        "id": record.id,
        "name": record.name,
        "protocol": str(record.protocol),
        **{f"{_AT}{number}": format_address(host, port) for number, host in enumerate(hosts)},
        **{_PROPERTY + key: value for key, value in record.properties.items()},
    }
    told: dict[str, str] = {
        **entries,
        "cluster": _told_cluster(service, entries, record.cluster, key).decode(),
    }
    _check(record, told)
    return AsyncServiceInfo(
        SERVICE_TYPE,
        service,
        port=port,
        properties=told,
        server=f"{instance}.local.",
        parsed_addresses=list(hosts),
    )


def _told_cluster(
    service: str, entries: Mapping[str, str], cluster: str, key: bytes | None
) -> bytes:
    """The announced cluster: with a key, a tag of all announced entries."""
    if key is None:
        return cluster.encode()
    covered = json.dumps([service.lower(), cluster, sorted(entries.items())]).encode()
    tag = hmac.digest(key, b"edge announces " + covered, hashlib.sha256)
    return tag.hex()[:_TAG_HEX].encode()


def _check(record: PeerRecord, entries: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for a record that cannot be announced."""
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
