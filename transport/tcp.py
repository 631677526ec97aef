"""Connecting over TCP: makes channels and links to a listening peer.

``TcpChannel`` and ``TcpLink`` move the bytes afterwards.
"""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from edge.transport.address import describe, number_of, resolve
from edge.transport.async_socket import AsyncSocket, watch_for_death
from edge.transport.credentials import Credentials
from edge.transport.errors import (
    AddressError,
    OutdatedError,
    PeerLostError,
    TransportError,
    UnknownHereError,
    UnwantedError,
)
from edge.transport.handshake import Greeted, Role, bring, display_name, encode_hello, greet
from edge.transport.records import records_of
from edge.transport.sealed_socket import after_handshake
from edge.transport.tcp_channel import DEATH_NOTICED_WITHIN_S, TcpChannel
from edge.transport.tcp_link import TcpLink

_AGAIN_AFTER_S = 0.1
_WHILE_IT_STARTS_ANEW = (UnknownHereError, AddressError, PeerLostError)
"""Errors of a daemon that restarts with a new key, for about a second."""


async def connect(
    address: str,
    *,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    device: str | None = None,
    timeout_s: float = 5.0,
) -> TcpChannel:
    """A channel to the peer that listens on ``address``; ``hello`` describes this side.

    ``credentials``: shown to and required of the peer; None for a peer without. ``device``: the id
    that the peer must have. A text under ``name`` in the hello becomes part of the name that the
    other side prints.

    Raises:
        AddressError: the address cannot be used, nothing listens there, or nothing answers.
        VersionMismatchError: the peer speaks another version of the protocol; it is told as well.
        RefusedError: it is of another cluster, or knows this device no longer.
        ProtocolError: what listens there is not Edge.
        PeerLostError: it closed the connection or fell silent during the handshake.
    """
    greeted, host = await _open(address, Role.CHANNEL, hello, credentials, timeout_s, device)
    moved = after_handshake(greeted.connection, greeted.secrets)
    return TcpChannel(moved, greeted.hello, host)


async def connect_link(
    address: str,
    *,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    device: str | None = None,
    timeout_s: float = 5.0,
    link_timeout_s: float = 30.0,
) -> TcpLink:
    """A link to the peer that listens on ``address``. It fails after ``link_timeout_s`` of silence.

    The hello tells the peer which link this is. ``device`` and errors as in :func:`connect`.
    """
    greeted, _ = await _open(address, Role.LINK, hello, credentials, timeout_s, device)
    connection, records = greeted.connection, records_of(greeted.secrets)
    return TcpLink(connection.detach(), connection.peer, link_timeout_s, records)


async def _open(
    address: str,
    role: Role,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    timeout_s: float,
    device: str | None = None,
) -> tuple[Greeted, str]:
    """A connection after its handshake, and the numeric address of its other end.

    If one side has an earlier key of the cluster, it is told the current one.
    """
    encode_hello(hello)
    loop = asyncio.get_running_loop()
    ends_at, left_s, has_brought = loop.time() + timeout_s, timeout_s, False
    while True:
        shown = None if credentials is None else credentials.now()
        try:
            return await _open_once(address, role, hello, shown, left_s, device)
        except TransportError as error:
            left_s = ends_at - loop.time()
            if left_s <= 0 or shown is None:
                raise
            if isinstance(error, OutdatedError):
                if shown.now() is shown:
                    raise
                continue
            if isinstance(error, UnknownHereError):
                has_brought = await _brought(address, shown, timeout_s=left_s) or has_brought
            if not has_brought or not isinstance(error, _WHILE_IT_STARTS_ANEW):
                raise
            await asyncio.sleep(_AGAIN_AFTER_S)
            left_s = max(_AGAIN_AFTER_S, ends_at - loop.time())


async def bring_rotation(address: str, credentials: Credentials, *, timeout_s: float) -> bool:
    """Bring the current key to the peer if it has an earlier one. Returns whether it has
    followed."""
    return await _brought(address, credentials.now(), timeout_s=timeout_s)


async def _brought(address: str, credentials: Credentials, *, timeout_s: float) -> bool:
    ends_at = asyncio.get_running_loop().time() + timeout_s  # for all keys together
    for past in credentials.past():
        connection: AsyncSocket | None = None
        try:
            async with asyncio.timeout_at(ends_at):
                connected, _ = await _connect_to_first(address)
                connection = AsyncSocket(connected, address)
                await bring(connection, past)
            return True
        except TransportError:
            continue
        except TimeoutError:
            break
        finally:
            if connection is not None:
                connection.close()
    return False


async def _open_once(
    address: str,
    role: Role,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    timeout_s: float,
    device: str | None,
) -> tuple[Greeted, str]:
    connection: AsyncSocket | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connected, host = await _connect_to_first(address)
            connection = AsyncSocket(connected, address)
            greeted = await greet(connection, role, hello, credentials, device)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            if connection is None:
                raise AddressError(
                    f"cannot connect to {address}: no answer within {timeout_s:g} s; check that "
                    "the device is on and that no firewall blocks the port"
                ) from error
            why = "is it Edge's port?"
            if connection.received_bytes:
                why = (
                    "it is very busy, or large packets get lost on the way: compare the MTU of "
                    "the networks in between (ip link)"
                )
            raise PeerLostError(
                address, f"silent for {timeout_s:g} s during the handshake; {why}"
            ) from error
        if isinstance(error, PeerLostError) and not isinstance(error, UnwantedError):
            raise PeerLostError(address, f"{error.reason} during the handshake") from error
        raise
    greeted.connection.peer = display_name(greeted.hello, address)
    return greeted, host


async def _connect_to_first(address: str) -> tuple[socket.socket, str]:
    """A socket connected to the first place of ``address`` that answers, and that place's
    number."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, place in await resolve(address, to_listen=False):
        candidate = socket.socket(family, socket.SOCK_STREAM)
        try:
            candidate.setblocking(False)
            await loop.sock_connect(candidate, place)
            watch_for_death(candidate, within_s=DEATH_NOTICED_WITHIN_S)
        except OSError as error:
            candidate.close()
            failure = error
        except BaseException:
            candidate.close()
            raise
        else:
            return candidate, number_of((family, place))
    assert failure is not None
    raise AddressError(f"cannot connect to {address}: {describe(failure)}") from failure
