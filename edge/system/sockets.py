"""Stream sockets: calls that wait for a time or not at all, what the system knows of a connection,
and sockets between two processes of one user."""

import contextlib
import errno
import math
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge.system.kind import PORTABLE

if sys.platform != "win32":
    import fcntl
    import termios

_LAST_ACK_RECEIVED = struct.Struct("@56xI")
"""Milliseconds since the last acknowledgement, in Linux's struct tcp_info."""

_LAST_DATA_RECEIVED = struct.Struct("@52xI")
"""Milliseconds since the last received byte."""

_UNREAD = struct.Struct("@i")

_CREDENTIALS = struct.Struct("@3i")
"""Linux's struct ucred: process, user, group."""

_MOST_JOINED_BYTES = 64 << 10

_NOBODY = 65534
"""The user id of every user unknown to this user namespace."""

Buffers = Sequence[Any]
"""Objects with bytes: memoryviews, bytearrays or arrays."""


@dataclass(frozen=True, slots=True)
class StreamCalls:
    """The calls of one connected socket. Each returns the number of moved bytes, which may be fewer
    than were asked for, and raises BlockingIOError if nothing can be moved: those with `_now` at
    once, the others after the limit of `stream_calls`. A receiving call returns 0 at the end.
    """

    send: Callable[[Buffers], int]
    send_now: Callable[[Buffers], int]
    receive: Callable[[Buffers], int]
    receive_now: Callable[[Buffers], int]
    wait: Callable[[], None]
    """Wait until the socket can move bytes in any direction."""


def stream_calls(connected: socket.socket, limit_s: float) -> StreamCalls:
    """The calls of a connected socket, of which each waits for at most `limit_s` seconds.

    The socket blocks, with the kernel's limits (SO_RCVTIMEO, SO_SNDTIMEO): Python's `settimeout`
    adds a system call to every read. Without such limits the socket does not block, and a call
    that must wait waits in select.
    """
    if sys.platform == "win32" or PORTABLE:
        return _selecting_calls(connected, limit_s)
    fraction, seconds = math.modf(limit_s)
    # At least a microsecond: zero means no limit.
    limit = struct.pack("@ll", int(seconds), max(1, int(fraction * 1e6)))
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sends, receives = connected.sendmsg, connected.recvmsg_into
    at_once = socket.MSG_DONTWAIT
    poller = select.poll()
    poller.register(connected, select.POLLIN | select.POLLOUT)

    def wait() -> None:
        if not poller.poll(limit_s * 1000):
            raise BlockingIOError

    return StreamCalls(
        send=sends,
        send_now=lambda buffers: sends(buffers, (), at_once),
        receive=lambda buffers: receives(buffers)[0],
        receive_now=lambda buffers: receives(buffers, 0, at_once)[0],
        wait=wait,
    )


def _selecting_calls(connected: socket.socket, limit_s: float) -> StreamCalls:
    connected.setblocking(False)

    def await_ready(*, reads: bool, writes: bool) -> None:
        found = select.select(
            [connected] if reads else [], [connected] if writes else [], [], limit_s
        )
        if not any(found):
            raise BlockingIOError

    def waiting(call: Callable[[Buffers], int], *, reads: bool) -> Callable[[Buffers], int]:
        def called(buffers: Buffers) -> int:
            try:
                return call(buffers)
            except BlockingIOError:
                await_ready(reads=reads, writes=not reads)
                return call(buffers)

        return called

    def send_now(buffers: Buffers) -> int:
        return _sent_at_once(connected, buffers)

    def receive_now(buffers: Buffers) -> int:
        return _each_in_turn(connected.recv_into, buffers)

    return StreamCalls(
        send=waiting(send_now, reads=False),
        send_now=send_now,
        receive=waiting(receive_now, reads=True),
        receive_now=receive_now,
        wait=lambda: await_ready(reads=True, writes=True),
    )


def _sent_at_once(connected: socket.socket, buffers: Buffers) -> int:
    """Bytes of `buffers` that the socket takes now. Small ones are joined: each call may make a
    packet of its own."""
    if sum(map(_size, buffers)) <= _MOST_JOINED_BYTES:
        return connected.send(b"".join(buffers))
    return _each_in_turn(connected.send, buffers)


def _size(buffer: Any) -> int:
    return len(buffer) if isinstance(buffer, bytes | bytearray) else int(buffer.nbytes)


def _each_in_turn(call: Callable[[Any], int], buffers: Buffers) -> int:
    """Bytes that the call has moved from or into `buffers` until it moved fewer than one has."""
    done = 0
    for each in buffers:
        size = _size(each)
        if not size:
            continue
        try:
            count = call(each)
        except BlockingIOError:
            if done:
                return done
            raise
        done += count
        if count < size:
            break
    return done


def send_buffers(connected: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Send what a non-blocking socket takes now of `buffers`, as `socket.sendmsg`. Raises
    BlockingIOError if it takes nothing."""
    if sys.platform == "win32" or PORTABLE:
        return _sent_at_once(connected, buffers)
    return connected.sendmsg(buffers)


def probe_when_idle(connected: socket.socket, *, idle_s: int, interval_s: int, probes: int) -> None:
    """Have the system probe an idle connection (keepalive), as far as it lets the times be set."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    options = {idle: idle_s, "TCP_KEEPINTVL": interval_s, "TCP_KEEPCNT": probes}
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unread_bytes(connected: socket.socket) -> int | None:
    """Received bytes that wait to be read; None: the system does not tell."""
    if sys.platform != "win32" and not PORTABLE:
        told = fcntl.ioctl(connected, termios.FIONREAD, bytes(_UNREAD.size))
        return int(_UNREAD.unpack(told)[0])
    return None


def unacknowledged_s(connected: socket.socket) -> float:
    """Seconds without an acknowledgement of the other device; 0 if the system does not tell."""
    return _since_s(connected, _LAST_ACK_RECEIVED)


def silent_s(connected: socket.socket) -> float:
    """Seconds without a received byte; 0 if some wait to be read, or the system does not tell."""
    unread = unread_bytes(connected)
    return 0.0 if unread or unread is None else _since_s(connected, _LAST_DATA_RECEIVED)


def _since_s(connected: socket.socket, told_at: struct.Struct) -> float:
    """A time from Linux's struct tcp_info, in seconds; 0 on other systems."""
    if sys.platform != "linux" or PORTABLE or is_local(connected):
        return 0.0
    told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, told_at.size)
    if len(told) < told_at.size:
        return 0.0
    (milliseconds,) = told_at.unpack(told)
    return float(milliseconds) / 1000


def is_local(connected: socket.socket) -> bool:
    """Whether it is a socket between processes of this host that is not of TCP."""
    return sys.platform != "win32" and connected.family == socket.AF_UNIX


def has_user_sockets() -> bool:
    """Whether `bound_for_user` and `connected_for_user` work: the system knows sockets that have a
    name and no file, and tells the user of the other end."""
    return sys.platform == "linux" and not PORTABLE


def bound_for_user(name: str, waiting: int) -> socket.socket:
    """A listening, non-blocking socket with this abstract name. Raises OSError.

    Such a name leaves no file, and other network namespaces do not see it. Only Linux has them.
    """
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.bind(f"\0{name}")
        bound.listen(waiting)
    except BaseException:
        bound.close()
        raise
    return bound


def connected_for_user(name: str) -> socket.socket:
    """A non-blocking socket connected to that of `bound_for_user`. Raises OSError."""
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    came = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        came.setblocking(False)
        came.connect(f"\0{name}")
    except BaseException:
        came.close()
        raise
    return came


def is_of_this_user(connected: socket.socket) -> bool:
    """Whether a process of this user made the other end of such a socket. Raises OSError."""
    if sys.platform != "linux":
        return False
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid() != _NOBODY)
