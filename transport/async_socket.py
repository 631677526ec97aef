"""A connected stream socket for asyncio: every wait can be cancelled without losing a byte.

Knows bytes and the operating system's errors; knows no frames.

Why not ``loop.sock_recv_into`` and similar calls: they move bytes in a callback, so a task that is
cancelled at that moment never learns how many. Here a callback only says "ready", and the task
itself moves the bytes. Why not ``asyncio`` streams: they read ahead, and a link's socket must reach
the compute thread with nothing read from it.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from edge.system.sockets import is_local, probe_when_idle, send_buffers
from edge.transport.errors import ChannelClosedError, PeerLostError
from edge.transport.frame import Buffer

_TURN_BYTES = 1 << 20
"""Most bytes moved before other tasks run: a heartbeat must not wait for a shard."""

_LEAST_COST_BYTES = 16 << 10
"""The least that one read counts for: many small frames in a row must yield, too."""

_NOT_READY = (BlockingIOError, InterruptedError)


class AsyncSocket:
    """Owns a non-blocking socket. One task may receive and one may send at the same time."""

    record_bytes = 0
    """Most received bytes that are held outside the caller's space."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        connected.setblocking(False)
        if not is_local(connected):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self.is_closed = False
        """Whether :meth:`close` or :meth:`detach` was called."""
        self.received_bytes = 0
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._turn_left = _TURN_BYTES

    async def receive_into(self, space: memoryview) -> int:
        """Put at least one byte into ``space`` and return how many.

        Raises ``PeerLostError`` at the end of the stream, ``ChannelClosedError`` after close.
        """
        while True:
            self._check_open()
            if self._turn_left <= 0:
                # Yield before the bytes move, never after: a cancellation here must lose none.
                self._turn_left = _TURN_BYTES
                await asyncio.sleep(0)
                continue
            try:
                count = self._socket.recv_into(space[:_TURN_BYTES])
            except _NOT_READY:
                self._turn_left = _TURN_BYTES
                await self._readable()
                continue
            except OSError as error:
                raise PeerLostError(self.peer, _reason(error)) from error
            if count == 0:
                raise PeerLostError(self.peer, "it closed the connection")
            self._turn_left -= max(count, _LEAST_COST_BYTES)
            self.received_bytes += count
            return count

    async def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Send the bytes of ``buffers``, oldest first.

        When this is cancelled or fails after the first byte went out, the socket is closed: the
        rest can no longer be sent, and nothing else may follow what was.
        """
        rest = [memoryview(buffer) for buffer in buffers]
        in_the_middle = False
        try:
            while rest:
                self._check_open()
                try:
                    count = send_buffers(self._socket, _first_turn(rest))
                except _NOT_READY:
                    await self._writable()
                    continue
                except OSError as error:
                    # Do not close: what the peer sent before it closed may still be read.
                    in_the_middle = False
                    raise PeerLostError(self.peer, _reason(error)) from error
                rest = drop_bytes(rest, count)
                in_the_middle = bool(rest)
                if count >= _TURN_BYTES:
                    await asyncio.sleep(0)
        except BaseException:
            if in_the_middle:
                self.close()
            raise

    def ends(self) -> tuple[Any, Any]:
        """The addresses of both ends, as `socket` has them. Raises OSError."""
        return self._socket.getsockname(), self._socket.getpeername()

    def close(self) -> None:
        """Close the socket; pending calls raise ``ChannelClosedError``. May be called again."""
        if not self.is_closed:
            self._release().close()

    def detach(self) -> socket.socket:
        """Hand the socket over: this object is closed, the socket lives on, nothing was read."""
        self._check_open()
        return self._release()

    def _release(self) -> socket.socket:
        self.is_closed = True
        # Before the descriptor is freed: another socket may get its number at once.
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        for waiter in (self._reading, self._writing):
            if waiter is not None:
                _wake(waiter)
        return self._socket

    def _check_open(self) -> None:
        if self.is_closed:
            raise ChannelClosedError(f"the connection to {self.peer} was closed")

    async def _readable(self) -> None:
        waiter = self._reading = self._loop.create_future()
        # Replaces a reader that is still registered, without a system call.
        self._loop.add_reader(self._socket, self._on_readable, waiter)
        try:
            await waiter
        finally:
            self._reading = None

    def _on_readable(self, waiter: "asyncio.Future[None]") -> None:
        if waiter.done():  # no read is waiting
            self._loop.remove_reader(self._socket)
        else:
            waiter.set_result(None)

    async def _writable(self) -> None:
        waiter = self._writing = self._loop.create_future()
        self._loop.add_writer(self._socket, _wake, waiter)
        try:
            await waiter
        finally:
            self._writing = None
            if not self.is_closed:
                self._loop.remove_writer(self._socket)


def watch_for_death(connected: socket.socket, *, within_s: int) -> None:
    """Have the system detect a vanished device behind an idle connection in about ``within_s``
    seconds (keepalive).

    A busy peer is not affected: its system answers the probes. TCP_USER_TIMEOUT is not set, because
    it also ends connections with a slow reader.
    """
    interval_s = max(1, within_s // 6)
    probe_when_idle(connected, idle_s=max(1, within_s // 2), interval_s=interval_s, probes=3)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def drop_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The rest of ``buffers`` (of bytes) after their first ``count`` bytes."""
    rest = list(buffers)
    while rest and count >= rest[0].nbytes:
        count -= rest.pop(0).nbytes
    if count:
        rest[0] = rest[0][count:]
    return rest


def _first_turn(buffers: list[memoryview]) -> list[memoryview]:
    """The first buffers, cut at one turn's bytes."""
    head, room = [], _TURN_BYTES
    for buffer in buffers:
        head.append(buffer[:room])
        room -= head[-1].nbytes
        if room == 0:
            break
    return head


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
