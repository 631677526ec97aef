"""A link over one TCP socket: the hot path of everything that runs on several devices.

Knows a connected socket; how it was connected is not its business.

The socket is a blocking one whose time limits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): Python's
own ``settimeout`` costs one more system call before every read. What must not block says so call by
call (MSG_DONTWAIT).

The arrays are given to the socket as they are: a view of their bytes costs more than the system
call's own share of a small message. That every array is a buffer, typing learns in Python 3.12.
"""

import contextlib
import math
import os
import select
import socket
import struct
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.async_socket import drop_bytes
from transport.errors import PeerLostError, ProtocolError
from transport.frame import Buffer
from transport.link_guard import EAGER_BYTES, LinkGuard, check_incoming, check_outgoing

_SIZE = struct.Struct("!Q")

POLL_S = 100e-6

_LEAST_SEND_BUFFER_BYTES = 4 * EAGER_BYTES
"""Room for ``EAGER_BYTES`` and the kernel's bookkeeping, which it counts too."""


class TcpLink:
    """A link over a connected TCP socket, which it owns from now on. See :class:`Link`.

    The kernel counts its time limit from the start of a system call: a peer that falls silent in
    the middle of a message may be noticed only after twice ``timeout_s``.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float = 30.0) -> None:
        if not timeout_s > 0:
            raise ValueError(f"a link's timeout is a time above 0 s, not {timeout_s}")
        fraction, seconds = math.modf(timeout_s)
        # At least a microsecond: zero would mean to wait for ever.
        limit = struct.pack("@ll", int(seconds), max(1, int(fraction * 1e6)))
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _LEAST_SEND_BUFFER_BYTES:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LEAST_SEND_BUFFER_BYTES)
        self.peer = peer
        self._socket = connected
        self._timeout_s = timeout_s
        self._size = bytearray(_SIZE.size)
        self._guard = LinkGuard(peer, interrupt=self._shut_down, release=connected.close)

    def send(self, array: NDArray[Any]) -> None:
        check_outgoing(array)
        with self._guard.sending:
            try:
                size = _SIZE.pack(array.nbytes)
                sent = self._socket.sendmsg((size, array))  # type: ignore[arg-type]
                if sent < _SIZE.size + array.nbytes:
                    self._send_rest(drop_bytes((memoryview(size), _as_bytes(array)), sent))
            except OSError as error:
                raise self._lost(error, "took") from None

    def receive(self, into: NDArray[Any]) -> None:
        check_incoming(into)
        with self._guard.receiving:
            try:
                self._receive(into)
            except OSError as error:
                raise self._lost(error, "sent") from None

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        check_outgoing(outgoing)
        check_incoming(incoming)
        with self._guard.exchanging:
            try:
                size = _SIZE.pack(outgoing.nbytes)
                try:
                    sent = self._socket.sendmsg((size, outgoing), (), socket.MSG_DONTWAIT)  # type: ignore[arg-type]
                except BlockingIOError:
                    sent = 0
                if sent == _SIZE.size + outgoing.nbytes:
                    # All of it lies in the kernel's buffers: nothing to wait for but the answer.
                    self._receive(incoming)
                else:
                    rest = drop_bytes((memoryview(size), _as_bytes(outgoing)), sent)
                    self._exchange_rest(rest, incoming)
            except OSError as error:
                raise self._lost(error, "moved") from None

    def close(self) -> None:
        self._guard.close()

    def _shut_down(self) -> None:
        # Wakes a thread that blocks in this socket, which closing alone would not.
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

    def _receive(self, into: NDArray[Any]) -> None:
        """Size and bytes in one system call, which is all that a small message takes."""
        header = _SIZE.size
        if not into.nbytes:
            count = self._socket.recv_into(self._size)
        else:
            count = self._poll_for((self._size, into))  # type: ignore[arg-type]
        if count < header:
            self._receive_rest(memoryview(self._size)[count:], is_ended=count == 0)
            count = header
        self._check_size(into)
        if count < header + into.nbytes:
            self._receive_rest(_as_bytes(into)[count - header :], is_ended=False)

    def _poll_for(self, buffers: tuple[Buffer, Buffer]) -> int:
        """Receive into the buffers, asking again and again for a moment before sleeping.

        To sleep and be woken costs 10 to 50 µs, on a virtual machine more; shards that compute in
        step mostly wait for less. The processor is offered to others between two questions.
        """
        receive, end_s = self._socket.recvmsg_into, time.perf_counter() + POLL_S
        while True:
            try:
                return receive(buffers, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                if time.perf_counter() > end_s:
                    return receive(buffers)[0]
                os.sched_yield()

    def _receive_rest(self, space: memoryview, *, is_ended: bool) -> None:
        while not is_ended and space.nbytes:
            count = self._socket.recv_into(space)
            space = space[count:]
            is_ended = count == 0
        if is_ended:
            raise self._ended()

    def _send_rest(self, buffers: list[memoryview]) -> None:
        while buffers:
            buffers = drop_bytes(buffers, self._socket.sendmsg(buffers))

    def _exchange_rest(self, outgoing: list[memoryview], into: NDArray[Any]) -> None:
        """Move what can be moved in either direction until one of them is done."""
        space = memoryview(self._size)
        is_size_known = False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        while outgoing:
            if not poller.poll(self._timeout_s * 1000):
                raise BlockingIOError
            with contextlib.suppress(BlockingIOError):
                outgoing = drop_bytes(
                    outgoing, self._socket.sendmsg(outgoing, (), socket.MSG_DONTWAIT)
                )
            if space.nbytes:
                with contextlib.suppress(BlockingIOError):
                    count = self._socket.recv_into(space, 0, socket.MSG_DONTWAIT)
                    if count == 0:
                        raise self._ended()
                    space = space[count:]
            if not space.nbytes and not is_size_known:
                self._check_size(into)
                is_size_known = True
                space = _as_bytes(into)
            elif not space.nbytes:
                # Everything is here: only the way out is left, and it may block.
                self._send_rest(outgoing)
                return
        if not is_size_known:
            self._receive_rest(space, is_ended=False)
            self._check_size(into)
            space = _as_bytes(into)
        self._receive_rest(space, is_ended=False)


def _as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, shared."""
    return array.reshape(-1).view(np.uint8).data
