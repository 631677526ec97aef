"""Probes of multicast, listening and writing on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
from pathlib import Path

PROBE_GROUPS = {socket.AF_INET: "239.255.83.69", socket.AF_INET6: "ff12::5345"}
"""Multicast groups of the local site (RFC 2365) or link without other known uses."""

PROBE_WITHIN_S = 0.5


def multicast_failure(name: str, address: str) -> str | None:
    """Why multicast on the interface of this name and address does not loop back; None: it does.

    This tests this machine only: a router or an access point may still drop packets.
    """
    said = os.urandom(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    group = PROBE_GROUPS[family]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(("", 0))
            probe.settimeout(PROBE_WITHIN_S)
            if family is socket.AF_INET6:
                number = struct.pack("@I", socket.if_nametoindex(name))
                joined = socket.inet_pton(family, group) + number
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, joined)
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, number)
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 0)
            else:
                interface = socket.inet_aton(address)
                joined = socket.inet_aton(group) + interface
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            probe.sendto(said, (group, probe.getsockname()[1]))
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
