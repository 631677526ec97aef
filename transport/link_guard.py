"""Concurrency rules of every link: one sender, one receiver, and an orderly end.

Knows threads and errors; moves no byte.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from edge.transport.errors import ChannelClosedError, PeerLostError, ProtocolError, TransportError
from edge.transport.link import LinkState

EAGER_BYTES = 32 << 10
"""``send`` of at most this many bytes never waits for the peer if nothing else is under way."""


def check_outgoing(array: NDArray[Any]) -> None:
    """Raise ``ValueError`` unless ``array`` can be sent from its memory as it is."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"a link sends C-contiguous arrays; this one of shape {array.shape} has strides "
            f"{array.strides}: copy it with numpy.ascontiguousarray first"
        )


def check_incoming(array: NDArray[Any]) -> None:
    """Raise ``ValueError`` unless bytes can be received straight into ``array``."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(
            f"a link receives into C-contiguous writable arrays; this one of shape {array.shape} "
            f"has strides {array.strides} and is{'' if array.flags.writeable else ' not'} writable"
        )


class LinkGuard:
    """Admits one sender and one receiver at a time, until a call fails or the link is closed.

    ``interrupt`` makes calls inside the link return or raise, from any thread. ``release`` frees
    what the link holds. It runs once, when the link has ended and no call is inside: a closed
    socket's number may at once belong to another socket. It also runs after a failure without a
    close: otherwise a peer blocked in a full send buffer would not learn that nobody reads.
    """

    def __init__(
        self, peer: str, *, interrupt: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.sending = _Passage(self, sends=True, receives=False)
        self.receiving = _Passage(self, sends=False, receives=True)
        self.exchanging = _Passage(self, sends=True, receives=True)
        self._interrupt = interrupt
        self._release = release
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_released = False
        self._failure: TransportError | None = None
        self._has_sender = False
        self._has_receiver = False
        self._sent = self._received = 0

    def state(self, silent_s: Callable[[], float]) -> LinkState:
        """`silent_s`: called only while a call receives and the link's resources exist."""
        with self._lock:
            is_waited_for = self._has_receiver and not self._is_released
            return LinkState(
                sent=self._sent,
                received=self._received,
                silent_s=silent_s() if is_waited_for else 0.0,
            )

    def close(self) -> None:
        """Admit no more calls and interrupt those inside. May be called again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._end()

    def _end(self) -> None:
        """Interrupt the calls inside, and release when they have left. The caller holds the
        lock."""
        if self._is_released:
            return
        self._interrupt()
        if not (self._has_sender or self._has_receiver):
            self._is_released = True
            self._release()

    def _closed_error(self) -> ChannelClosedError:
        return ChannelClosedError(f"the link to {self.peer} was closed")

    def _enter(self, sends: bool, receives: bool) -> None:
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            if self._failure is not None:
                raise copy.copy(self._failure)
            if (sends and self._has_sender) or (receives and self._has_receiver):
                raise RuntimeError(f"another thread is using the link to {self.peer}")
            self._has_sender |= sends
            self._sent += sends
            self._has_receiver |= receives

    def _leave(self, sends: bool, receives: bool, error: BaseException | None) -> None:
        with self._lock:
            if sends:
                self._has_sender = False
            if receives:
                self._has_receiver = False
                self._received += error is None
            is_closed = self._is_closed
            if error is not None and self._failure is None:
                self._failure = self._lasting(error)
            if is_closed or self._failure is not None:
                self._end()
        if is_closed and isinstance(error, TransportError):
            # The socket's error was caused by our own close.
            raise self._closed_error() from None

    def _lasting(self, error: BaseException) -> TransportError:
        """The error of later calls, after ``error`` ended a call in the middle of a message."""
        if isinstance(error, PeerLostError | ProtocolError):
            return copy.copy(error)
        return ChannelClosedError(
            f"the link to {self.peer} was closed: {type(error).__name__} ended a call on it midway"
        )


class _Passage:
    """A context manager around the moving of bytes in one or both directions."""

    __slots__ = ("_guard", "_receives", "_sends")

    def __init__(self, guard: LinkGuard, *, sends: bool, receives: bool) -> None:
        self._guard = guard
        self._sends = sends
        self._receives = receives

    def __enter__(self) -> None:
        self._guard._enter(self._sends, self._receives)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._guard._leave(self._sends, self._receives, error)
