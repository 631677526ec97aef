"""Channels: the interface of the control plane, and an in-memory implementation.

Knows frames and their order; knows nothing of what they mean.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, Self

from edge.transport.errors import ChannelClosedError, PeerLostError
from edge.transport.frame import (
    OF_ALL_FRAMES,
    PREFIX_BYTES,
    Admit,
    Frame,
    FrameLimits,
    LimitsOf,
    admit_all,
    decode,
    encode,
    no_other_limits,
    value_bytes,
)

MEMORY_QUEUE_FRAMES = 64
"""Frames that wait in one direction of a memory channel before ``send`` blocks."""


class Channel(Protocol):
    """An ordered two-way stream of frames to one peer, used from one event loop.

    A frame is delivered whole or not at all, in the order sent. A returned ``send`` does not mean
    that the peer has read the frame: only an answer does. Frames that the peer sent before it
    closed usually arrive, which is not promised.

    A channel does not decide whether a silent peer is alive. A receiver watches whether
    ``received_bytes`` grows, and counts the time.
    """

    @property
    def peer(self) -> str:
        """Printable name of the other end, for messages."""

    @property
    def host(self) -> str:
        """Numeric address of the other end's device, without a port; empty within one process."""

    @property
    def remote_hello(self) -> Mapping[str, Any]:
        """What the other end said about itself when the connection was made."""

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived so far, those of incomplete frames included: a sign of life."""

    async def send(self, frame: Frame) -> None:
        """Send one frame; several tasks may call this at once.

        A cancelled send has sent nothing, or it has closed the channel: half a frame is never
        followed by another.

        Raises:
            ChannelClosedError: this side closed the channel.
            PeerLostError: the other side closed it or died.
            ProtocolError: the frame is not allowed; nothing was sent and the channel lives on.
        """

    async def receive(
        self,
        limits_of: LimitsOf = no_other_limits,
        admit: Admit = admit_all,
        *,
        most: FrameLimits = OF_ALL_FRAMES,
    ) -> Frame:
        """Receive the next frame. One task at a time. A cancelled receive loses nothing.

        ``most``: the size limit, checked before anything of a frame is read. ``limits_of``: asked
        for the limits of a kind before the payload is read. ``admit``: awaited before memory is
        allocated for a header, its values or a payload. A receive that continues a cancelled one
        may ask for the same again.

        Raises:
            ChannelClosedError: this side closed the channel, also while this call waited.
            PeerLostError: the other side closed it or died.
            ProtocolError: what arrived is not a frame, or over its limits; the channel is closed.
            RuntimeError: another task is in receive() already.
        """

    async def aclose(self) -> None:
        """Close this side; may be called again. Pending calls raise ``ChannelClosedError``."""


class _Pipe:
    """One direction of a memory channel: encoded frames, oldest first."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.changed = asyncio.Condition()


class MemoryChannel:
    """A channel to another object in the same event loop.

    Frames are encoded and decoded as on a socket, so both refuse and change the same values.
    """

    def __init__(
        self, peer: str, remote_hello: Mapping[str, Any], incoming: _Pipe, outgoing: _Pipe
    ) -> None:
        """Use :meth:`pair`."""
        self.peer = peer
        self.host = ""
        self.remote_hello = remote_hello
        self.received_bytes = 0
        self._incoming = incoming
        self._outgoing = outgoing
        self._other: MemoryChannel = self
        self._is_closed = False
        self._is_receiving = False

    @classmethod
    def pair(
        cls,
        first: str = "first",
        second: str = "second",
        *,
        first_hello: Mapping[str, Any] | None = None,
        second_hello: Mapping[str, Any] | None = None,
    ) -> tuple[Self, Self]:
        """The two ends of a new channel. The first end's ``peer`` is ``second``."""
        to_second, to_first = _Pipe(), _Pipe()
        end = cls(second, second_hello or {}, to_first, to_second)
        other = cls(first, first_hello or {}, to_second, to_first)
        end._other, other._other = other, end
        return end, other

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError(f"the channel to {self.peer} was closed")

    async def send(self, frame: Frame) -> None:
        self._check_open()
        data = b"".join(encode(frame))
        pipe = self._outgoing
        async with pipe.changed:
            while len(pipe.frames) >= MEMORY_QUEUE_FRAMES and not (
                self._is_closed or self._other._is_closed
            ):
                await pipe.changed.wait()
            self._check_open()
            if self._other._is_closed:
                raise PeerLostError(self.peer, "it closed the channel")
            pipe.frames.append(data)
            pipe.changed.notify_all()

    async def receive(
        self,
        limits_of: LimitsOf = no_other_limits,
        admit: Admit = admit_all,
        *,
        most: FrameLimits = OF_ALL_FRAMES,
    ) -> Frame:
        self._check_open()
        if self._is_receiving:
            raise RuntimeError(f"another task already receives from {self.peer}")
        pipe = self._incoming
        self._is_receiving = True
        try:
            async with pipe.changed:
                while not (pipe.frames or self._is_closed or self._other._is_closed):
                    await pipe.changed.wait()
                self._check_open()
                if not pipe.frames:
                    raise PeerLostError(self.peer, "it closed the channel")
                data = pipe.frames.popleft()
                self.received_bytes += len(data)
                pipe.changed.notify_all()
        finally:
            self._is_receiving = False
        await admit(len(data))
        header_bytes = int.from_bytes(data[:4])
        await admit(value_bytes(data[PREFIX_BYTES : PREFIX_BYTES + header_bytes]))
        return decode(data, limits_of, most=most)

    async def aclose(self) -> None:
        self._is_closed = True
        for pipe in (self._incoming, self._outgoing):
            async with pipe.changed:
                pipe.changed.notify_all()
