"""Parsing and resolving of network addresses.

Knows the text forms and how the system resolves them; opens no connection.
"""

import asyncio
import errno
import ipaddress
import os
import re
import socket

from edge.transport.errors import AddressError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

SocketAddress = tuple[int, tuple[str, int] | tuple[str, int, int, int]]
"""Address family, and the address in the form that ``socket`` wants for it."""

_FORM = re.compile(
    r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]\s]*)):(?P<port>[0-9]{1,5})", re.ASCII
)

_REMEDIES = {
    errno.EADDRINUSE: "another program listens there: stop it or choose another port",
    errno.EACCES: "this user may not: choose a port above 1023",
    errno.EADDRNOTAVAIL: "no interface of this device has that address",
    errno.ECONNREFUSED: "nothing listens there: check that Edge is running and the port is right",
    errno.EHOSTUNREACH: "there is no way to that device: check that both are on one network",
    errno.ENETUNREACH: "there is no way to that network: check that this device is connected",
    errno.ETIMEDOUT: "it does not answer: check that it is on and that no firewall blocks the port",
}


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``:port`` (host is then empty) or ``[IPv6]:port``.

    Raises:
        AddressError: the text has none of these forms, or the port is over 65535.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise AddressError(
            f"'{text}' is not an address; write host:port, or [address]:port for IPv6"
        )
    port = int(match["port"])
    if port > 65535:
        raise AddressError(f"'{text}' is not an address; ports end at 65535")
    return match["six"] or match["host"], port


def parse_number(text: str) -> tuple[IPAddress, int]:
    """As `parse_address`, for a host that must be a number: no name server is asked.

    Raises AddressError, also for a name.
    """
    host, port = parse_address(text)
    number = _number(host)
    if number is None:
        raise AddressError(f"'{text}' has no numeric host")
    return number, port


def format_address(host: str, port: int) -> str:
    """The text that :func:`parse_address` reads; IPv6 addresses get their brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe(error: OSError) -> str:
    """Cause and, if known, remedy of a failure to listen or connect."""
    cause = os.strerror(error.errno) if error.errno else str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{cause}; {remedy}" if remedy else cause


def number_of(place: SocketAddress) -> str:
    """The host as a number; a link-local IPv6 address includes its interface."""
    _, where = place
    host, _ = socket.getnameinfo(where, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return host


def _number(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def resolve(address: str, *, to_listen: bool) -> list[SocketAddress]:
    """The socket addresses that ``address`` stands for, best first, never empty.

    An empty host means every interface for listening, of IPv4 and of IPv6, and is refused for
    connecting. A name server is asked only for names, never for numbers.

    Raises:
        AddressError: the address cannot be parsed or its name cannot be resolved.
    """
    host, port = parse_address(address)
    if not host:
        if not to_listen:
            raise AddressError(f"'{address}' names no host to connect to: write host:port")
        return [
            (socket.AF_INET, ("0.0.0.0", port)),  # noqa: S104  the caller asked for all interfaces
            (socket.AF_INET6, ("::", port, 0, 0)),
        ]
    if not to_listen and port == 0:
        raise AddressError(f"'{address}' names no port to connect to: write host:port")
    loop = asyncio.get_running_loop()
    try:
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            if _number(host) is not None:  # an address with an interface that does not exist here
                raise
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(
            f"cannot find '{host}' of '{address}': {error}; check the name or write its number"
        ) from error
    return [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]
