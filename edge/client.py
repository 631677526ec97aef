"""The coordinator's end of one Channel: calls that are answered, and events that are not asked for.

Knows frames and futures; what a kind means is in wire.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import transport
from edge.errors import EdgeError, NetworkError, PeerLostError, ProtocolError
from edge.wire import error_from_header
from transport import Channel, Frame

Buffer = bytes | bytearray | memoryview


class PeerClient:
    """Use `PeerClient.connect`; every call raises the peer's error, or PeerLostError."""

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        on_event: Callable[[PeerClient, Frame], None] | None = None,
        on_lost: Callable[[PeerClient, EdgeError], None] | None = None,
    ) -> None:
        self.address = address
        self.name = str(channel.remote_hello.get("name", address))
        self.id = str(channel.remote_hello.get("id", address))
        self._channel = channel
        self._on_event = on_event
        self._on_lost = on_lost
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._ended: EdgeError | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float = 5.0,
        on_event: Callable[[PeerClient, Frame], None] | None = None,
        on_lost: Callable[[PeerClient, EdgeError], None] | None = None,
    ) -> PeerClient:
        """Raises NetworkError when nothing usable answers there."""
        try:
            channel = await transport.connect(
                address, hello={"name": "coordinator"}, timeout_s=timeout_s
            )
        except transport.TransportError as error:
            raise map_transport_error(error, address) from error
        return cls(channel, address, on_event=on_event, on_lost=on_lost)

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
            await self._send(Frame(kind=kind, header={**(header or {}), "call": call_id},
                                   payload=payload))  # fmt: skip
            answer = await future
        finally:
            self._waiting.pop(call_id, None)
        if answer.kind == "failed":
            raise error_from_header(self.name, answer.header)
        return answer

    async def post(self, kind: str, header: Mapping[str, Any]) -> None:
        """Send a frame that is not answered."""
        if self._ended is not None:
            raise self._ended
        await self._send(Frame(kind=kind, header=header))

    async def aclose(self) -> None:
        self._on_lost = None
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._channel.aclose()
        self._end(NetworkError(f"the connection to peer {self.name} is closed"))

    async def _send(self, frame: Frame) -> None:
        try:
            await self._channel.send(frame)
        except transport.TransportError as error:
            raise self._ended or map_transport_error(error, self.name) from error

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._channel.receive()
                call_id = frame.header.get("call")
                if call_id is None:
                    if self._on_event is not None:
                        self._on_event(self, frame)
                elif (future := self._waiting.get(call_id)) is not None and not future.done():
                    future.set_result(frame)
        except transport.TransportError as error:
            self._end(map_transport_error(error, self.name))

    def _end(self, error: EdgeError) -> None:
        if self._ended is None:
            self._ended = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        if self._on_lost is not None:
            self._on_lost(self, error)


def map_transport_error(error: transport.TransportError, peer: str) -> EdgeError:
    """The one place where transport's errors become ours."""
    if isinstance(error, transport.PeerLostError):
        return PeerLostError(peer, error.reason)
    if isinstance(error, transport.ProtocolError):
        return ProtocolError(f"peer {peer}: {error}")
    return NetworkError(str(error))
