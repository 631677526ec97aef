"""Two ends on one host, of one user: what they say goes on over a Unix socket, and is not sealed.

Both have proved before to be members. Whoever could listen in between two processes of one user
could read their memory as well, so sealing would keep nothing from anybody, and a sum would take
twice as long. The kernel says whose process is at the other end (SO_PEERCRED), and a secret of this
handshake that it is the one of this connection.

The socket's name is an abstract one: it leaves no file behind, and a device in another network
namespace does not find it. It is random, and bound before it is told, so nobody else can have it;
who sees it in the system's list and connects is hung up on. Only Linux has all that.
"""

import contextlib
import hmac
import os
import re
import secrets
import socket
import struct
import sys

from edge.transport.async_socket import AsyncSocket

PROOF_BYTES = 32

_IS_POSSIBLE = sys.platform == "linux"
_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CREDENTIALS = struct.Struct("@3i")
"""Linux's struct ucred: process, user, group."""

_NOBODY = 65534
"""Stands for every user that this user namespace does not know."""

_WAITING = 8
"""At a door, until it is looked who they are."""

_SEND_BUFFER_BYTES = 1 << 20
"""Asked for, because a Unix socket's does not grow; the system has a limit of its own."""


def way(connection: AsyncSocket, *, listens: bool) -> str:
    """Both ends of a TCP connection as the connecting one sees them, if they are on one host; else
    nothing.

    A relay between them makes it another one at each end.
    """
    if not _IS_POSSIBLE:
        return ""
    try:
        ends = connection.ends()
    except OSError:
        return ""
    (own, own_port), (other, other_port) = ends[0][:2], ends[1][:2]
    if own != other:
        return ""
    ports = (other_port, own_port) if listens else (own_port, other_port)
    return f"{own} {ports[0]} {ports[1]}"


class Door:
    """Where the other end may come in, once."""

    def __init__(self, bound: socket.socket, name: str) -> None:
        """See `opened`."""
        self.name = name
        self._bound = bound

    @classmethod
    def opened(cls) -> "Door | None":
        """None where the system has none to give."""
        name = secrets.token_hex(16)
        with contextlib.suppress(OSError):
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.setblocking(False)
                bound.bind(_address(name))
                bound.listen(_WAITING)
            except BaseException:
                bound.close()
                raise
            return cls(bound, name)
        return None

    def let_in(self, proof: bytes) -> socket.socket | None:
        """Whoever waits, is of this user and has sent this proof; the others are hung up on."""
        for _ in range(_WAITING + 1):
            try:
                came, _nameless = self._bound.accept()
            except OSError:
                break
            with contextlib.suppress(OSError):
                came.setblocking(False)
                if _is_of_this_user(came) and hmac.compare_digest(came.recv(len(proof)), proof):
                    _widen(came)
                    return came
            came.close()
        return None

    def close(self) -> None:
        """Who waits in vain is hung up on."""
        self._bound.close()


def enter(name: object, proof: bytes) -> socket.socket | None:
    """Come to the door that the other end has named; None if it is not this user's, or not here."""
    if not _IS_POSSIBLE or not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    with contextlib.suppress(OSError):
        came = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            came.setblocking(False)
            came.connect(_address(name))
            if _is_of_this_user(came) and came.send(proof) == len(proof):
                _widen(came)
                return came
        came.close()
    return None


def _address(name: str) -> str:
    return f"\0{name}"


def _is_of_this_user(connected: socket.socket) -> bool:
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _process, user, _group = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid() != _NOBODY)


def _widen(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
