"""Probes of multicast, listening and writing on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

PROBE_GROUP = "239.255.83.69"
"""A multicast group of the local site (RFC 2365) without other known uses."""

PROBE_WITHIN_S = 0.5


def multicast_failure(address: str) -> str | None:
    """Why multicast on the interface with this IPv4 address does not loop back; None: it does.

    This tests this machine only: a router or an access point may still drop packets.
    """
    said = os.urandom(16)
    interface = socket.inet_aton(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("", 0))
            probe.settimeout(PROBE_WITHIN_S)
            group = socket.inet_aton(PROBE_GROUP) + interface
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            probe.sendto(said, (PROBE_GROUP, probe.getsockname()[1]))
            return None if probe.recv(64) == said else "something else answered"
    except TimeoutError:
        return "nothing came back"
    except OSError as error:
        return error.strerror or str(error)


def listen_failure(host: str, port: int) -> str | None:
    """Why a daemon cannot listen there; None: it can."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None


def write_failure(folder: Path) -> str | None:
    """Why the folder, or the nearest existing one above it, is not writable; None: it is."""
    try:
        with tempfile.TemporaryFile(dir=existing(folder)) as file:
            file.write(b"edge")
    except OSError as error:
        return error.strerror or str(error)
    return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    for each in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            if each.is_dir():
                return each
    return Path("/")
