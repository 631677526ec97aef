"""The coordinator's end of one Channel: calls with answers, posts, and events from the peer.

Knows frames and futures; the types of frames are listed in frame_table.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from edge import transport
from edge.errors import EdgeError, NetworkError, PeerError, PeerLostError, ProtocolError
from edge.membership.roles import LEND
from edge.protocol.announced_peers import is_announced_as
from edge.protocol.error_codec import Failed
from edge.protocol.expulsion import until_expelled
from edge.protocol.fields import one_line
from edge.protocol.frame_codec import ANSWER, Call, Event, Post, from_frame, to_frame
from edge.protocol.frame_table import FRAMES, limits_of
from edge.protocol.heartbeat import (
    ALIVE,
    PEER_SILENT_AFTER_S,
    PEER_SILENT_AT_MOST_S,
    Hearing,
    show_life,
)
from edge.protocol.peer_frames import Leaving
from edge.transport import (
    MEMBER,
    Channel,
    Credentials,
    Frame,
    Member,
    format_address,
    parse_address,
)
from edge.version import __version__

Answer = TypeVar("Answer")
Body = TypeVar("Body")

CONNECT_WITHIN_S = 5.0

IT_LEAVES = "its user has stopped it"

OnEvent = Callable[["PeerClient", Event], None]
OnLeaving = Callable[["PeerClient"], None]

_log = logging.getLogger(__name__)


class PeerClient:
    """A connection to one peer; made by `PeerClient.connect`.

    Every call raises the peer's error, or PeerLostError. `on_event` gets the events of the peer. It
    is called in the event loop and must not block.
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        name: str | None = None,
        credentials: Credentials | None,
        silent_after_s: float,
        on_event: OnEvent | None,
    ) -> None:
        self.address = address
        self.reached_at = format_address(channel.host, parse_address(address)[1])
        """The same address with a numeric host."""
        self.name = name or one_line(channel.remote_hello.get("name", address))
        member: Member | None = channel.remote_hello.get(MEMBER)
        self.device = None if member is None else member.id
        """Id of the device whose certificate the peer has shown; None: it has none."""
        self._channel = channel
        self._on_event = on_event
        self._on_lost: Callable[[EdgeError], None] | None = None
        self._on_leaving: OnLeaving | None = None
        self.is_leaving = False
        """The peer has said that it stops soon."""
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._given_up: set[int] = set()
        """Calls that timed out or were cancelled; their answers are dropped."""
        self._ended: EdgeError | None = None
        self._hearing = Hearing(
            channel, silent_after_s=silent_after_s, at_most_s=PEER_SILENT_AT_MOST_S
        )
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self._read(),
                self._show_life(),
                self._watch(),
                self._watch_membership(credentials),
            )
        ]

    @classmethod
    async def connect(
        cls,
        address: str,
        credentials: Credentials | None,
        *,
        name: str | None = None,
        device: str | None = None,
        announced: str | None = None,
        timeout_s: float = CONNECT_WITHIN_S,
        silent_after_s: float = PEER_SILENT_AFTER_S,
        on_event: OnEvent | None = None,
    ) -> PeerClient:
        """Connect to the peer at `address`.

        credentials: of this device; None for a peer that wants none. device: the id that the peer
        must have; None: any. announced: the id of the announcement that it must have made.
        name: how errors name the peer; None: as it names itself.

        Raises NetworkError when no peer answers there, or one that may not compute for others;
        ProtocolError, a kind of it, when it runs another version.
        """
        try:
            channel = await transport.connect(
                address,
                hello={"name": "coordinator", "software": __version__},
                credentials=credentials,
                device=device,
                timeout_s=timeout_s,
            )
        except transport.TransportError as error:
            raise map_transport_error(error, address) from error
        if (difference := software_difference(channel)) is not None:
            await channel.aclose()
            raise ProtocolError(difference)
        if announced is not None and not is_announced_as(channel.remote_hello, announced):
            await channel.aclose()
            raise NetworkError(
                f"another peer answers at {address} than the one that is announced there",
                remedy="both have this address: give one of them another one, or start its daemon "
                "with --interface and the interface that leads to the others",
            )
        member: Member | None = channel.remote_hello.get(MEMBER)
        if member is not None and LEND not in member.roles:
            await channel.aclose()
            raise NetworkError(
                f"device {one_line(member.name)} ({address}) may only use other devices of its "
                "cluster, not compute for them",
                remedy="pair it again with --role lend",
            )
        return cls(
            channel,
            address,
            name=name,
            credentials=None if credentials is None else credentials.now(),
            silent_after_s=silent_after_s,
            on_event=on_event,
        )

    def watch(
        self, on_lost: Callable[[EdgeError], None], on_leaving: OnLeaving | None = None
    ) -> None:
        """Call `on_lost` once when the peer is lost or closes the connection.

        Call `on_leaving` once when the peer says that it stops as soon as no session is open there.
        It still answers for a few seconds (`LEAVES_WITHIN_S` in heartbeat.py).
        """
        self._on_lost, self._on_leaving = on_lost, on_leaving
        if self._ended is not None:
            on_lost(self._ended)
        elif self.is_leaving and on_leaving is not None:
            on_leaving(self)

    def listen(self, on_event: OnEvent) -> None:
        """Give events to `on_event` from now on."""
        self._on_event = on_event

    async def call(self, call: Call[Answer], *, limit_s: float | None = None) -> Answer:
        """Send a call and wait for its answer, for `limit_s` or the time limit of its kind."""
        if self._ended is not None:
            raise self._ended
        self._next_id += 1
        call_id = self._next_id
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        limit_s = call.limit_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._send(to_frame(call.kind, call, call=call_id))
                answer = await future
        except TimeoutError as error:
            raise PeerError(
                self.name,
                f"it did not answer {call.kind!r} within {limit_s:g} s",
                remedy="restart Edge there",
            ) from error
        finally:
            del self._waiting[call_id]
            if future.cancelled() or not future.done():
                self._given_up.add(call_id)
            else:
                future.exception()  # marks the error as seen, also where sending failed first
        if answer.kind == Failed.kind:
            raise self._read_answer(Failed, call, answer).as_error(self.name)
        if answer.kind != ANSWER:
            raise ProtocolError(f"peer {self.name} answers {call.kind!r} by {answer.kind[:80]!r}")
        return self._read_answer(call.answer(), call, answer)

    async def post(self, post: Post) -> None:
        """Send a frame that has no answer."""
        if self._ended is not None:
            raise self._ended
        await self._send(to_frame(post.kind, post))

    async def aclose(self) -> None:
        """Close the connection; waiting calls fail. May be called again."""
        self._on_lost = self._on_leaving = None
        self._end(NetworkError(f"the connection to peer {self.name} is closed"))
        await self._channel.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, frame: Frame) -> None:
        try:
            await self._channel.send(frame)
        except transport.TransportError as error:
            raise self._ended or map_transport_error(error, self.name) from error

    async def _read(self) -> None:
        """Dispatch the frames that arrive. When it ends, all waiting calls fail."""
        failure: EdgeError = NetworkError(f"the connection to peer {self.name} is closed")
        try:
            while True:
                frame = await self._channel.receive(limits_of)
                if frame.kind != ALIVE.kind:
                    self._hand_out(frame)
        except transport.TransportError as error:
            failure = map_transport_error(error, self.name)
        except EdgeError as error:
            failure = error
        except Exception as error:
            _log.exception("reading from peer %s failed", self.name)
            failure = ProtocolError(f"peer {self.name} sent what cannot be handled: {error}")
        finally:
            await self._channel.aclose()
            self._end(failure)

    def _hand_out(self, frame: Frame) -> None:
        call_id = frame.header.get("call")
        if call_id is None:
            event = self._event(frame)
            if isinstance(event, Leaving):
                self._leaves()
            elif self._on_event is not None:
                self._on_event(self, event)
            return
        if type(call_id) is int and call_id in self._given_up:
            self._given_up.remove(call_id)
            return
        future = self._waiting.get(call_id) if type(call_id) is int else None
        if future is None or (future.done() and not future.cancelled()):
            raise ProtocolError(
                f"peer {self.name} answers call {call_id!r:.80}, which was not made",
                remedy="restart Edge there, and if that does not help, update it on both devices",
            )
        if not future.cancelled():
            future.set_result(frame)

    def _leaves(self) -> None:
        if not self.is_leaving:
            self.is_leaving = True
            if self._on_leaving is not None:
                self._on_leaving(self)

    def _event(self, frame: Frame) -> Event:
        cls = FRAMES.get(frame.kind)
        if cls is None or not issubclass(cls, Event):
            raise PeerError(self.name, f"sent a malformed {frame.kind[:80]!r}: it is no event")
        try:
            return from_frame(cls, frame)
        except ProtocolError as error:
            raise PeerError(self.name, f"sent {one_line(error)}") from error

    def _read_answer(self, cls: type[Body], call: Call[Any], frame: Frame) -> Body:
        try:
            return from_frame(cls, frame)
        except ProtocolError as error:
            raise ProtocolError(
                f"peer {self.name} answers {call.kind!r} in a form Edge does not know "
                f"({one_line(error)})",
                remedy="update Edge on both devices",
            ) from error

    async def _show_life(self) -> None:
        with contextlib.suppress(transport.TransportError):  # the reader reports the error
            await show_life(self._channel)

    async def _watch(self) -> None:
        silent_s = await self._hearing.until_silent()
        self._end(PeerLostError(self.name, f"it was silent for {silent_s:.1f} s"))
        await self._channel.aclose()

    async def _watch_membership(self, credentials: Credentials | None) -> None:
        await until_expelled(credentials, self._channel.remote_hello.get(MEMBER))
        reason = "its device has been expelled from the cluster, or the cluster has a new key"
        self._end(PeerLostError(self.name, reason))
        await self._channel.aclose()

    def _end(self, error: EdgeError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        if self._on_lost is not None:
            self._on_lost(error)


def software_difference(channel: Channel) -> str | None:
    """A sentence for an end that runs another version of Edge; None for the same version."""
    theirs = channel.remote_hello.get("software", __version__)
    if theirs == __version__:
        return None
    return (
        f"{channel.peer} runs Edge {one_line(theirs, limit=40)}, this device runs Edge "
        f"{__version__}: install the same version on both"
    )


def map_transport_error(error: transport.TransportError, peer: str) -> EdgeError:
    """The EdgeError for an error of transport."""
    if isinstance(error, transport.PeerLostError):
        return PeerLostError(peer, error.reason)
    if isinstance(error, transport.ProtocolError):
        return ProtocolError(f"peer {peer}: {error}")
    return NetworkError(str(error))
