"""Pairing discovery: two devices with the same code find each other on the network and pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from edge import transport
from edge.errors import NetworkError, RequestError
from edge.host.interfaces import dial_order
from edge.membership.identity import Identity
from edge.membership.membership import Membership
from edge.membership.pairing import (
    CODE_LASTS_S,
    CannotKeepError,
    HeldMembership,
    Invitation,
    Other,
    WrongCodeError,
    join,
    meeting_place,
)
from edge.membership.roles import ROLES
from edge.transport import Channel, Discovery, Link, PeerFound, PeerRecord, ZeroconfDiscovery

_TALK_LIMIT_S = 20.0
"""Time limit of one pairing once the devices are connected, in seconds."""

_MOST_TALKS = 8
"""Most connections at once, and half as many from one address. For one more, the oldest of those
with the fewest messages is closed."""

_FIND_LIMIT_S = 20.0
_GATHER_S = 1.0
"""Seconds to wait for more announcements after the first one, which may be a squatter's."""

_MOST_ASKED = 3

_log = logging.getLogger(__name__)


async def invite(
    code: str,
    own: HeldMembership,
    name: str,
    *,
    roles: Collection[str] = ROLES,
    listen: str = ":0",
    interfaces: Sequence[str] | None = None,
    discovery: Discovery | None = None,
    on_ready: Callable[[Sequence[str]], None],
) -> Other:
    """Wait for a device with this code and make it a member with these roles.

    on_ready: gets the addresses once the device listens. discovery: announces them; None: zeroconf
    on `interfaces`. own: stores the new member. Devices that fail before a guess are ignored.

    Raises WrongCodeError after a wrong guess, CannotKeepError, and NetworkError if nobody comes in
    time or the network cannot be used.
    """
    door = _Door(Invitation(code, own, name, roles))
    async with _open(door, code, listen, discovery or _zeroconf(code, interfaces)) as addresses:
        on_ready(addresses)
        try:
            async with asyncio.timeout(CODE_LASTS_S):
                return await door.outcome
        except TimeoutError:
            raise NetworkError(
                f"no device has come within {CODE_LASTS_S / 60:g} minutes",
                remedy="the code is void now: show a new one",
            ) from None


@contextlib.asynccontextmanager
async def _open(
    door: _Door, code: str, listen: str, discovery: Discovery
) -> AsyncIterator[Sequence[str]]:
    """Listen for joining devices; at the end, their connections are closed."""
    place = meeting_place(code)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(discovery.aclose)
        try:
            listener = await transport.listen(
                listen, hello={}, credentials=None, on_channel=door.talk, on_link=_refuse
            )
            stack.push_async_callback(listener.aclose)
            record = PeerRecord(
                id=uuid.uuid4().hex, name="", cluster=place, addresses=listener.addresses
            )
            await discovery.announce(record)
        except (transport.TransportError, OSError) as error:
            raise NetworkError(f"cannot wait for another device: {error}") from error
        yield listener.addresses


async def _refuse(link: Link, _hello: object) -> None:
    link.close()


@dataclass(eq=False, slots=True)
class _Talk:
    """A connection from a joining device."""

    host: str
    task: asyncio.Task[None]
    words: int = 0
    """Number of its messages so far."""

    def count(self) -> None:
        self.words += 1


class _Door:
    """Serves joining devices until one of them has guessed."""

    def __init__(self, invitation: Invitation) -> None:
        self.outcome: asyncio.Future[Other] = asyncio.get_running_loop().create_future()
        """The new member, or WrongCodeError or CannotKeepError."""
        self._invitation = invitation
        self._talks: dict[asyncio.Task[None], _Talk] = {}
        """Connections, the oldest first."""

    async def talk(self, channel: Channel) -> None:
        """Serve one connection in the calling task."""
        task = asyncio.current_task()
        assert task is not None
        async with contextlib.aclosing(channel):
            if self.outcome.done():
                return
            self._make_room(channel.host)
            self._talks[task] = talk = _Talk(channel.host, task)
            try:
                async with asyncio.timeout(_TALK_LIMIT_S):
                    self._end(await self._invitation.take_in(channel, talk.count))
            except (WrongCodeError, CannotKeepError) as error:
                self._end(error)
            except (TimeoutError, RequestError, transport.TransportError) as error:
                _log.info("%s does not pair: %s", channel.peer, str(error) or "it takes too long")
            finally:
                self._talks.pop(task, None)

    def _make_room(self, host: str) -> None:
        """Close one connection if there are too many."""
        of_host = [talk for talk in self._talks.values() if talk.host == host]
        if len(of_host) >= _MOST_TALKS // 2:
            self._hang_up(of_host)
        elif len(self._talks) >= _MOST_TALKS:
            self._hang_up(self._talks.values())

    def _hang_up(self, talks: Iterable[_Talk]) -> None:
        least = min(talks, key=lambda talk: talk.words)
        del self._talks[least.task]
        least.task.cancel()

    def _end(self, outcome: Other | WrongCodeError | CannotKeepError) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, Other):
            self.outcome.set_result(outcome)
        else:
            self.outcome.set_exception(outcome)


async def find_and_join(
    code: str,
    identity: Identity,
    name: str,
    *,
    address: str | None = None,
    interfaces: Sequence[str] | None = None,
    discovery: Discovery | None = None,
) -> tuple[Membership, Other]:
    """Find the device that shows this code, or use its address, and join. Returns this device's
    membership.

    discovery: None: zeroconf on `interfaces`. Anyone can announce the same meeting place, and each
    device asked gets one guess of the words. So at most three are asked, chosen at random.

    Raises WrongCodeError, RequestError for an invalid answer, and NetworkError if there is no
    device or none takes this one in.
    """
    asked = _Asked(code, identity, name)
    if address is None:
        records = await _announced(discovery or _zeroconf(code, interfaces))
        return await asked.any_of([record.addresses for record in records])
    try:
        return await asked.at(address)
    except _UnreachableError as error:
        raise NetworkError(f"the device that shows the code cannot be reached: {error}") from error
    except TimeoutError:
        raise NetworkError("the other device does not answer; show a new code there") from None
    except transport.TransportError as error:
        raise NetworkError(
            f"the other device ended the pairing ({error})",
            remedy="if the words were the same, show a new code there",
        ) from error


class _UnreachableError(Exception):
    """The device could not be connected to, so it had no guess."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Asks announced devices to take this one in."""

    code: str
    identity: Identity
    name: str

    async def at(self, address: str) -> tuple[Membership, Other]:
        """Ask the device at `address`. Raises _UnreachableError if it cannot be connected to."""
        try:
            channel = await transport.connect(address, hello={}, credentials=None)
        except transport.TransportError as error:
            raise _UnreachableError(str(error)) from error
        async with contextlib.aclosing(channel), asyncio.timeout(_TALK_LIMIT_S):
            return await join(channel, self.code, self.identity, self.name)

    async def any_of(self, announced: Sequence[Sequence[str]]) -> tuple[Membership, Other]:
        """Ask devices, each with several addresses, until one has the same words.

        Each device is asked at one address before any is asked at a second one.
        """
        few = secrets.SystemRandom().sample(announced, min(_MOST_ASKED, len(announced)))
        waiting = deque(iter(dial_order(addresses)) for addresses in few)
        left = _MOST_ASKED
        failure = "it has no address"
        while waiting and left:
            addresses = waiting.popleft()
            for address in addresses:
                try:
                    return await self.at(address)
                except _UnreachableError as error:
                    failure = str(error)
                    continue
                except TimeoutError:
                    failure = f"{address} does not answer"
                except (RequestError, transport.TransportError) as error:
                    failure = str(error)
                left -= 1
                waiting.append(addresses)
                break
        raise NetworkError(
            f"no device that announces this code takes this one in ({failure})",
            remedy="if the words were the same, somebody else may be answering for them: show a "
            "new code, and add --peer with the address that is shown there, or use another "
            "network",
        )


async def _announced(discovery: Discovery) -> list[PeerRecord]:
    """All devices that announce the place, at least one. Raises NetworkError."""
    found: dict[str, PeerRecord] = {}
    try:
        async with asyncio.timeout(_FIND_LIMIT_S) as limit:
            async for event in discovery.watch():
                if isinstance(event, PeerFound):
                    if not found:
                        limit.reschedule(asyncio.get_running_loop().time() + _GATHER_S)
                    found[event.record.id] = event.record
                else:
                    found.pop(event.id, None)
    except TimeoutError:
        pass
    except (transport.TransportError, OSError) as error:
        raise NetworkError(f"cannot look for the other device: {error}") from error
    finally:
        await discovery.aclose()
    if found:
        return list(found.values())
    raise NetworkError(
        f"no device shows this code within {_FIND_LIMIT_S:g} s",
        remedy="compare the words, and where zeroconf does not reach, add --peer with the "
        "address that the other device shows",
    )


def _zeroconf(code: str, interfaces: Sequence[str] | None) -> Discovery:
    return ZeroconfDiscovery(cluster=meeting_place(code), interfaces=interfaces)
