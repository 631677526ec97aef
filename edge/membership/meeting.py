"""How two devices with the same code find each other, and pair over what they find."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import transport
from edge.errors import NetworkError, RequestError
from edge.membership.identity import Identity
from edge.membership.membership import Membership
from edge.membership.pairing import (
    CODE_LASTS_S,
    Other,
    WrongCodeError,
    check_takes_in,
    join,
    meeting_place,
    take_in,
)
from edge.membership.roles import ROLES
from transport import Channel, Link, PeerFound, PeerRecord, ZeroconfDiscovery

_TALK_LIMIT_S = 20.0
"""Of one pairing, once the devices have met."""

_FIND_LIMIT_S = 20.0
_MOST_WAITING = 8

_log = logging.getLogger(__name__)


async def invite(
    code: str,
    membership: Membership,
    name: str,
    *,
    roles: Collection[str] = ROLES,
    listen: str = "0.0.0.0:0",
    interfaces: Sequence[str] | None = None,
    on_ready: Callable[[Sequence[str]], None],
) -> Other:
    """Wait until a device with this code comes, and make it a member that may do what `roles` say.

    `on_ready` gets the addresses where that is waited for; zeroconf announces them, too. Somebody
    who does not get as far as a guess is passed over.

    Raises WrongCodeError when somebody guesses wrongly, NetworkError when nobody comes in time or
    the network cannot be used.
    """
    check_takes_in(membership)
    async with _waiting(code, listen, interfaces) as (came, addresses):
        on_ready(addresses)
        other: Other | None = None
        try:
            async with asyncio.timeout(CODE_LASTS_S):
                while other is None:
                    other = await _taken_in(await came.get(), code, membership, name, roles)
        except TimeoutError:
            raise NetworkError(
                f"no device has come within {CODE_LASTS_S / 60:g} minutes; the code is void now"
            ) from None
        return other


@contextlib.asynccontextmanager
async def _waiting(
    code: str, listen: str, interfaces: Sequence[str] | None
) -> AsyncIterator[tuple[asyncio.Queue[Channel], Sequence[str]]]:
    """Who comes, and where that is waited for."""
    came: asyncio.Queue[Channel] = asyncio.Queue(_MOST_WAITING)
    place = meeting_place(code)

    async def refuse(link: Link, _hello: object) -> None:
        link.close()

    async with contextlib.AsyncExitStack() as stack:
        try:
            listener = await transport.listen(
                listen, hello={}, credentials=None, on_channel=came.put, on_link=refuse
            )
            stack.push_async_callback(listener.aclose)
            discovery = ZeroconfDiscovery(cluster=place, interfaces=interfaces)
            stack.push_async_callback(discovery.aclose)
            record = PeerRecord(
                id=uuid.uuid4().hex, name="", cluster=place, addresses=listener.addresses
            )
            await discovery.announce(record)
        except (transport.TransportError, OSError) as error:
            raise NetworkError(f"cannot wait for another device: {error}") from error
        yield came, listener.addresses


async def _taken_in(
    channel: Channel, code: str, membership: Membership, name: str, roles: Collection[str]
) -> Other | None:
    """None for somebody who does not get as far as a guess. Raises WrongCodeError."""
    try:
        async with contextlib.aclosing(channel), asyncio.timeout(_TALK_LIMIT_S):
            return await take_in(channel, code, membership, name, roles)
    except WrongCodeError:
        raise
    except (TimeoutError, RequestError, transport.TransportError) as error:
        _log.info("%s does not pair: %s", channel.peer, error)
        return None


async def find_and_join(
    code: str,
    identity: Identity,
    name: str,
    *,
    address: str | None = None,
    interfaces: Sequence[str] | None = None,
) -> tuple[Membership, Other]:
    """Look for the device that shows this code, or ask at its address; this device's membership.

    Raises WrongCodeError, RequestError for an answer that makes no sense, and NetworkError when
    there is nobody.
    """
    try:
        addresses = (address,) if address else await _announced(code, interfaces)
        failure: Exception | None = None
        for each in addresses:
            try:
                channel = await transport.connect(each, hello={"name": name}, credentials=None)
            except transport.TransportError as error:
                failure = error
                continue
            async with contextlib.aclosing(channel), asyncio.timeout(_TALK_LIMIT_S):
                return await join(channel, code, identity, name)
        raise NetworkError(f"the device that shows the code cannot be reached: {failure}")
    except TimeoutError:
        raise NetworkError("the other device does not answer; show a new code there") from None
    except transport.TransportError as error:
        raise NetworkError(
            f"the other device ended the pairing ({error}); if the words were the same, show a new "
            "code there"
        ) from error


async def _announced(code: str, interfaces: Sequence[str] | None) -> tuple[str, ...]:
    discovery = ZeroconfDiscovery(cluster=meeting_place(code), interfaces=interfaces)
    try:
        async with asyncio.timeout(_FIND_LIMIT_S):
            async for event in discovery.watch():
                if isinstance(event, PeerFound):
                    return event.record.addresses
    except TimeoutError:
        pass
    finally:
        await discovery.aclose()
    raise NetworkError(
        f"no device shows this code within {_FIND_LIMIT_S:g} s; compare the words, and where "
        "zeroconf does not reach, add --peer with the address that the other device shows"
    )
