"""A link over one TCP socket: the hot path of a distributed model.

Knows a connected socket; connecting happens elsewhere. Between two processes of one host it may be
a Unix socket, whose other end never falls silent without being closed.

Dead device detection is the kernel's: it probes an idle connection every second and repeats
unacknowledged bytes. A device answers probes by itself, so a neighbour that computes, or reads from
a slow disk, for minutes is not lost, and the compute thread sends no heartbeat. A stopped or
hanging process is not detected here, but by its coordinator on the channel.

Arrays go to the socket as they are: a view of their bytes costs more than the system call of a
small message. Python's types know that an array is a buffer only from 3.12 on.
"""

import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from edge.system.processes import yield_core
from edge.system.sockets import (
    Buffers,
    is_local,
    probe_when_idle,
    silent_s,
    stream_calls,
    unacknowledged_s,
    unread_bytes,
)
from edge.transport.async_socket import drop_bytes
from edge.transport.errors import PeerLostError, ProtocolError
from edge.transport.link import LinkState
from edge.transport.link_guard import EAGER_BYTES, LinkGuard, check_incoming, check_outgoing
from edge.transport.records import PLAIN, BrokenRecordError, Part, Records, as_bytes, parts

_SIZE = struct.Struct("!Q")

POLL_S = 100e-6

REST_POLL_S = 3 * POLL_S
"""Seconds for which one message's rest is polled for, all its pieces together. Over a slow network
a large message comes in many pieces, and a poll for each took a tenth of a busy core."""

LOOK_EVERY_S = 1.0
"""Seconds between two checks of a waiting thread whether the other device acknowledges."""

DEVICE_GONE_AFTER_S = 5.0
"""Seconds without an acknowledgement after which the other device counts as lost. The kernel
repeats lost bytes after 0.2, 0.6, 1.4, 3.0 and 6.2 s, so a network that pauses for 3 s recovers."""

_LEAST_SEND_BUFFER_BYTES = 4 * EAGER_BYTES
"""Room for ``EAGER_BYTES`` and the kernel's bookkeeping, which counts too."""


class TcpLink:
    """A link over a connected stream socket, which it owns from now on. See :class:`Link`.

    Time limits count from the start of a system call: a peer that falls silent in the middle of a
    message may be detected after twice ``timeout_s``.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        timeout_s: float = 30.0,
        records: Records = PLAIN,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"a link's timeout is a time above 0 s, not {timeout_s}")
        calls = stream_calls(connected, min(timeout_s, LOOK_EVERY_S))
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _LEAST_SEND_BUFFER_BYTES:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LEAST_SEND_BUFFER_BYTES)
        if not is_local(connected):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            probes = math.ceil(DEVICE_GONE_AFTER_S)
            probe_when_idle(connected, idle_s=1, interval_s=1, probes=probes)
        self.peer = peer
        self._socket = connected
        self._calls = calls
        self._timeout_s = timeout_s
        self._records = records
        self._size = bytearray(_SIZE.size)
        self._waits_since_s: float | None = None
        """When a receiving call began to block: a Unix socket does not tell when bytes came."""
        self._guard = LinkGuard(peer, interrupt=self._shut_down, release=connected.close)

    def send(self, array: NDArray[Any]) -> None:
        check_outgoing(array)
        with self._guard.sending:
            try:
                size = _SIZE.pack(array.nbytes)
                first, others = self._cut(array)
                part = self._records.seal(size, first)
                sent = self._patiently(self._calls.send, (size, part))
                if sent < _SIZE.size + part.nbytes:
                    self._send_rest(drop_bytes((memoryview(size), as_bytes(part)), sent))
                for other in others:
                    self._send_rest([as_bytes(self._records.seal(size, other))])
            except OSError as error:
                raise self._lost(error, "took") from None

    def receive(self, into: NDArray[Any]) -> None:
        check_incoming(into)
        with self._guard.receiving:
            try:
                self._receive(into)
            except OSError as error:
                raise self._lost(error, "sent") from None
            except BrokenRecordError:
                raise self._broken() from None

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        check_outgoing(outgoing)
        check_incoming(incoming)
        with self._guard.exchanging:
            try:
                size = _SIZE.pack(outgoing.nbytes)
                first, others = self._cut(outgoing)
                part = self._records.seal(size, first)
                try:
                    sent = self._calls.send_now((size, part))
                except BlockingIOError:
                    sent = 0
                if sent == _SIZE.size + part.nbytes and not others:
                    # The kernel has buffered everything: only the answer remains.
                    self._receive(incoming)
                else:
                    rest = drop_bytes((memoryview(size), as_bytes(part)), sent)
                    sealed = (as_bytes(self._records.seal(size, each)) for each in others)
                    self._exchange_rest(rest, sealed, incoming)
            except OSError as error:
                raise self._lost(error, "moved") from None
            except BrokenRecordError:
                raise self._broken() from None

    def state(self) -> LinkState:
        return self._guard.state(self._silent_s)

    def close(self) -> None:
        self._guard.close()

    def _silent_s(self) -> float:
        if not is_local(self._socket):
            return silent_s(self._socket)
        since_s = self._waits_since_s
        if since_s is None or unread_bytes(self._socket):
            return 0.0
        return time.monotonic() - since_s

    def _patiently(self, call: Callable[[Buffers], int], buffers: Buffers) -> int:
        """Repeat a blocking call until it moves something. BlockingIOError after the time limit.

        Raises PeerLostError once the other device is unreachable.
        """
        try:
            return call(buffers)
        except BlockingIOError:
            end_s = time.monotonic() + self._timeout_s - min(self._timeout_s, LOOK_EVERY_S)
        while time.monotonic() < end_s:
            if (silent_s := unacknowledged_s(self._socket)) > DEVICE_GONE_AFTER_S:
                raise PeerLostError(
                    self.peer, f"its device was not reached over the link for {silent_s:.1f} s"
                )
            with contextlib.suppress(BlockingIOError):
                return call(buffers)
        raise BlockingIOError

    def _waiting(self, call: Callable[[Buffers], int], buffers: Buffers) -> int:
        """`_patiently`, for receiving calls."""
        self._waits_since_s = time.monotonic()
        try:
            return self._patiently(call, buffers)
        finally:
            self._waits_since_s = None

    def _movable(self, _none: Buffers) -> int:
        self._calls.wait()
        return 0

    def _shut_down(self) -> None:
        # Wakes a thread that blocks in this socket, unlike a close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _lost(self, error: OSError, verb: str) -> PeerLostError:
        if isinstance(error, BlockingIOError):  # The kernel's time limit passed.
            return PeerLostError(self.peer, f"it {verb} nothing for {self._timeout_s:g} s")
        return PeerLostError(self.peer, error.strerror or str(error))

    def _ended(self) -> PeerLostError:
        return PeerLostError(self.peer, "it closed the link")

    def _check_size(self, into: NDArray[Any]) -> None:
        (size,) = _SIZE.unpack(self._size)
        if size != into.nbytes:
            raise ProtocolError(f"{self.peer} sent {size} bytes where {into.nbytes} were expected")

    def _broken(self) -> ProtocolError:
        return ProtocolError(f"{self.peer} sent what was not sealed for this link")

    def _cut(self, array: NDArray[Any]) -> tuple[Part, Sequence[Part]]:
        """The first record of an array, which is mostly all of it, and the others."""
        if array.nbytes <= self._records.limit:
            return array, ()
        limit = self._records.record_bytes(array.nbytes)
        first, *others = parts(as_bytes(array), limit)
        return first, others

    def _receive(self, into: NDArray[Any]) -> None:
        """Receive size and bytes in one system call, which is enough for a small message."""
        header = _SIZE.size
        first, others = self._cut(into)
        space = self._records.space(first)
        if not space.nbytes:
            count = self._waiting(self._calls.receive, (self._size,))
        else:
            count = self._poll_for((self._size, space))
        if count < header:
            self._receive_rest(memoryview(self._size)[count:], is_ended=count == 0)
            count = header
        self._check_size(into)
        if count < header + space.nbytes:
            self._receive_rest(as_bytes(space)[count - header :], is_ended=False)
        self._records.open(self._size, first)
        for other in others:
            self._receive_rest(as_bytes(self._records.space(other)), is_ended=False)
            self._records.open(self._size, other)

    def _poll_for(self, buffers: Buffers, seconds: float = POLL_S) -> int:
        """Receive into buffers, polling for a moment before the thread sleeps.

        Sleeping and waking cost 10 to 50 µs, on a virtual machine more. Shards that compute in
        step, or wait for a record that is being sealed, mostly wait for less. The processor is
        yielded between polls.
        """
        end_s = time.perf_counter() + seconds
        while True:
            try:
                return self._calls.receive_now(buffers)
            except BlockingIOError:
                if time.perf_counter() > end_s:
                    return self._waiting(self._calls.receive, buffers)
                yield_core()

    def _receive_rest(self, space: memoryview, *, is_ended: bool) -> None:
        left_s = REST_POLL_S
        while not is_ended and space.nbytes:
            begun_s = time.perf_counter()
            count = self._poll_for((space,), min(POLL_S, left_s))
            left_s = max(0.0, left_s - (time.perf_counter() - begun_s))
            space = space[count:]
            is_ended = count == 0
        if is_ended:
            raise self._ended()

    def _send_rest(self, buffers: list[memoryview]) -> None:
        while buffers:
            buffers = drop_bytes(buffers, self._patiently(self._calls.send, buffers))

    def _exchange_rest(
        self, outgoing: list[memoryview], others: Iterator[memoryview], into: NDArray[Any]
    ) -> None:
        """Move bytes in either direction until one of them is done."""
        outgoing = outgoing or list(islice(others, 1))
        spaces = self._spaces(into)
        space = next(spaces, None)
        end_s = time.perf_counter() + POLL_S
        while outgoing and space is not None:
            moves = False
            with contextlib.suppress(BlockingIOError):
                sent = self._calls.send_now(outgoing)
                outgoing = drop_bytes(outgoing, sent) or list(islice(others, 1))
                moves = True
            with contextlib.suppress(BlockingIOError):
                count = self._calls.receive_now((space,))
                if count == 0:
                    raise self._ended()
                space = space[count:] if count < space.nbytes else next(spaces, None)
                moves = True
            if moves:
                end_s = time.perf_counter() + POLL_S
            elif time.perf_counter() < end_s:
                yield_core()
            else:
                self._waiting(self._movable, ())
        # One direction is left, and may block.
        while space is not None:
            self._receive_rest(space, is_ended=False)
            space = next(spaces, None)
        while outgoing:
            self._send_rest(outgoing)
            outgoing = list(islice(others, 1))

    def _spaces(self, into: NDArray[Any]) -> Iterator[memoryview]:
        """The spaces of a message's parts. Each is checked once it was filled."""
        yield memoryview(self._size)
        self._check_size(into)
        first, others = self._cut(into)
        for part in (first, *others):
            space = self._records.space(part)
            if space.nbytes:
                yield as_bytes(space)
            self._records.open(self._size, part)
