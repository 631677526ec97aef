"""An in-memory link between two threads of one process, without a socket.

It waits, refuses and fails as a socket does, so that the same errors deadlock in both.
"""

import threading
from collections import deque
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge.transport.errors import PeerLostError, ProtocolError
from edge.transport.link import LinkState
from edge.transport.link_guard import EAGER_BYTES, LinkGuard, check_incoming, check_outgoing

_CAPACITY_BYTES = 4 * EAGER_BYTES
"""Unread bytes in one direction before ``send`` blocks, as with a socket's buffers."""


class _Pipe:
    """One direction: messages, oldest first, and their bytes together."""

    def __init__(self) -> None:
        self.messages: deque[NDArray[np.uint8]] = deque()
        self.unread_bytes = 0


class MemoryLink:
    """A link to another object of the same process. See :class:`Link`."""

    def __init__(
        self,
        peer: str,
        timeout_s: float,
        changed: threading.Condition,
        incoming: _Pipe,
        outgoing: _Pipe,
    ) -> None:
        """Use :meth:`pair`."""
        self.peer = peer
        self._timeout_s = timeout_s
        self._changed = changed
        self._incoming = incoming
        self._outgoing = outgoing
        self._other: MemoryLink = self
        self._is_over = False
        self._guard = LinkGuard(peer, interrupt=self._interrupt, release=lambda: None)

    @classmethod
    def pair(
        cls, first: str = "first", second: str = "second", *, timeout_s: float = 30.0
    ) -> tuple[Self, Self]:
        """The two ends of a new link. The first end's ``peer`` is ``second``."""
        changed, to_second, to_first = threading.Condition(), _Pipe(), _Pipe()
        end = cls(second, timeout_s, changed, to_first, to_second)
        other = cls(first, timeout_s, changed, to_second, to_first)
        end._other, other._other = other, end
        return end, other

    def send(self, array: NDArray[Any]) -> None:
        check_outgoing(array)
        with self._guard.sending, self._changed:
            self._put(array)
            self._wait_until_taken()

    def receive(self, into: NDArray[Any]) -> None:
        check_incoming(into)
        with self._guard.receiving, self._changed:
            self._take(into)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        check_outgoing(outgoing)
        check_incoming(incoming)
        with self._guard.exchanging, self._changed:
            self._put(outgoing)
            self._take(incoming)
            self._wait_until_taken()

    def state(self) -> LinkState:
        return self._guard.state(lambda: 0.0)

    def close(self) -> None:
        self._guard.close()

    def _interrupt(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _put(self, array: NDArray[Any]) -> None:
        self._check_alive()
        self._outgoing.messages.append(array.reshape(-1).view(np.uint8).copy())
        self._outgoing.unread_bytes += array.nbytes
        self._changed.notify_all()

    def _take(self, into: NDArray[Any]) -> None:
        pipe = self._incoming
        while not pipe.messages:
            self._check_alive()
            self._wait("sent")
        if self._is_over:
            self._check_alive()
        message = pipe.messages[0]
        if message.nbytes != into.nbytes:
            raise ProtocolError(
                f"{self.peer} sent {message.nbytes} bytes where {into.nbytes} were expected"
            )
        into.reshape(-1).view(np.uint8)[:] = message
        pipe.messages.popleft()
        pipe.unread_bytes -= message.nbytes
        self._changed.notify_all()

    def _wait_until_taken(self) -> None:
        while self._outgoing.unread_bytes > _CAPACITY_BYTES:
            self._check_alive()
            self._wait("took")

    def _wait(self, verb: str) -> None:
        if not self._changed.wait(self._timeout_s):
            raise PeerLostError(self.peer, f"it {verb} nothing for {self._timeout_s:g} s")

    def _check_alive(self) -> None:
        if self._is_over or self._other._is_over:
            raise PeerLostError(self.peer, "it closed the link")
