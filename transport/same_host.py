"""Connections between two processes of one user on one host: a Unix socket without encryption.

Both ends have proved membership before. A process that could read this socket could read their
memory as well, so encryption would protect nothing, and would double the time of a sum. The kernel
tells the other end's user (SO_PEERCRED), and a secret of the handshake proves that it belongs to
this connection.

The socket has an abstract name: it leaves no file, and other network namespaces do not see it. The
name is random and bound before it is sent, so no other process can have it. Processes that find it
in the system's list are refused. Only Linux has all that.
"""

import contextlib
import hmac
import re
import secrets
import socket

from edge.system.sockets import (
    bound_for_user,
    connected_for_user,
    has_user_sockets,
    is_of_this_user,
)
from edge.transport.async_socket import AsyncSocket

PROOF_BYTES = 32

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_WAITING = 8
"""Connections that wait until they are checked."""

_SEND_BUFFER_BYTES = 1 << 20
"""Requested send buffer: a Unix socket's does not grow. The system limits it."""


def way(connection: AsyncSocket, *, listens: bool) -> str:
    """Both ends of a TCP connection, as the connecting side sees them. Empty if they are on
    different hosts.

    A relay between them makes the two sides' values differ.
    """
    if not has_user_sockets():
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


class LocalSocket:
    """A Unix socket at which the other end may connect once."""

    def __init__(self, bound: socket.socket, name: str) -> None:
        """See `opened`."""
        self.name = name
        self._bound = bound

    @classmethod
    def opened(cls) -> "LocalSocket | None":
        """A new socket. None if the system has no such sockets."""
        name = secrets.token_hex(16)
        with contextlib.suppress(OSError):
            return cls(bound_for_user(name, _WAITING), name)
        return None

    def let_in(self, proof: bytes) -> socket.socket | None:
        """The waiting connection of this user with this proof. All others are closed."""
        for _ in range(_WAITING + 1):
            try:
                came, _nameless = self._bound.accept()
            except OSError:
                break
            with contextlib.suppress(OSError):
                came.setblocking(False)
                if is_of_this_user(came) and hmac.compare_digest(came.recv(len(proof)), proof):
                    _widen(came)
                    return came
            came.close()
        return None

    def close(self) -> None:
        """Close the socket, and with it waiting connections."""
        self._bound.close()


def enter(name: object, proof: bytes) -> socket.socket | None:
    """Connect to the socket that the other end named. None if it is missing or another user's."""
    if not has_user_sockets() or not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    with contextlib.suppress(OSError):
        came = connected_for_user(name)
        with contextlib.suppress(OSError):
            if is_of_this_user(came) and came.send(proof) == len(proof):
                _widen(came)
                return came
        came.close()
    return None


def _widen(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
