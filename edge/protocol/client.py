"""The coordinator's end of one Channel: calls that are answered, and events that are not asked for.

Knows frames and futures; what a kind means is in messages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import transport
from edge.errors import EdgeError, NetworkError, PeerLostError, ProtocolError
from edge.protocol.heartbeat import ALIVE, SILENT_AFTER_S, Hearing, show_life
from edge.protocol.messages import error_from_header, printable
from transport import Channel, Frame

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class PeerClient:
    """Use `PeerClient.connect`; every call raises the peer's error, or PeerLostError.

    `on_event` gets frames that answer no call. It is called in the event loop and must not block.
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        silent_after_s: float,
        on_event: Callable[[PeerClient, Frame], None] | None,
    ) -> None:
        self.address = address
        self.name = printable(channel.remote_hello.get("name", address))
        self._channel = channel
        self._on_event = on_event
        self._on_lost: Callable[[EdgeError], None] | None = None
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._ended: EdgeError | None = None
        self._hearing = Hearing(silent_after_s=silent_after_s)
        self._tasks = [
            asyncio.create_task(work) for work in (self._read(), self._show_life(), self._watch())
        ]

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float = 5.0,
        silent_after_s: float = SILENT_AFTER_S,
        on_event: Callable[[PeerClient, Frame], None] | None = None,
    ) -> PeerClient:
        """Raises NetworkError when nothing usable answers there."""
        try:
            channel = await transport.connect(
                address, hello={"name": "coordinator"}, timeout_s=timeout_s
            )
        except transport.TransportError as error:
            raise map_transport_error(error, address) from error
        return cls(channel, address, silent_after_s=silent_after_s, on_event=on_event)

    def watch(self, on_lost: Callable[[EdgeError], None]) -> None:
        """Have `on_lost` called, once, when the peer goes away of its own accord, or has gone."""
        self._on_lost = on_lost
        if self._ended is not None:
            on_lost(self._ended)

    async def call(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Buffer = b""
    ) -> Frame:
        """Send a frame and wait for its answer."""
        if self._ended is not None:
            raise self._ended
        self._next_id += 1
        call_id = self._next_id
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            await self._send(Frame(kind, {**(header or {}), "call": call_id}, payload))
            answer = await future
        finally:
            del self._waiting[call_id]
            if future.done() and not future.cancelled():
                future.exception()  # seen, also where sending failed first
        if answer.kind == "failed":
            raise error_from_header(self.name, answer.header)
        if answer.kind != "ok":
            raise ProtocolError(f"peer {self.name} answers {kind!r} by {answer.kind[:80]!r}")
        return answer

    async def post(self, kind: str, header: Mapping[str, Any], payload: Buffer = b"") -> None:
        """Send a frame that is not answered."""
        if self._ended is not None:
            raise self._ended
        await self._send(Frame(kind, header, payload))

    async def aclose(self) -> None:
        """Hang up; calls that wait fail. May be called again."""
        self._on_lost = None
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
        """Hand out what arrives. However it ends, nobody is left waiting for an answer."""
        failure: EdgeError = NetworkError(f"the connection to peer {self.name} is closed")
        try:
            while True:
                frame = await self._channel.receive()
                self._hearing.heard()
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
            if self._on_event is not None:
                self._on_event(self, frame)
            return
        if type(call_id) is not int:
            raise ProtocolError(f"peer {self.name} answers a call that cannot be: {call_id!r:.80}")
        future = self._waiting.get(call_id)
        if future is not None and not future.done():
            future.set_result(frame)

    async def _show_life(self) -> None:
        with contextlib.suppress(transport.TransportError):  # the reader says why
            await show_life(self._channel)

    async def _watch(self) -> None:
        await self._hearing.until_silent()
        self._end(PeerLostError(self.name, f"it was silent for {self._hearing.silent_after_s:g} s"))
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


def map_transport_error(error: transport.TransportError, peer: str) -> EdgeError:
    """The one place where transport's errors become ours."""
    if isinstance(error, transport.PeerLostError):
        return PeerLostError(peer, error.reason)
    if isinstance(error, transport.ProtocolError):
        return ProtocolError(f"peer {peer}: {error}")
    return NetworkError(str(error))
