"""The limit of a process's open files and connections."""

import contextlib
import sys

WANTED_DESCRIPTORS = 4096
"""More than a daemon needs: 512 connections, as many links, 64 sessions with files."""

_WINDOWS_CONNECTIONS = 512
"""Sockets that select() of Windows takes."""


def allow_descriptors(wanted: int = WANTED_DESCRIPTORS) -> int:
    """Raise the limit to `wanted`, as far as the system allows, and return how many of these are
    allowed. The usual 1,024 of Linux, or 256 of macOS, are too few for several plans of many
    devices."""
    if sys.platform == "win32":
        return min(wanted, _WINDOWS_CONNECTIONS)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may know no such call
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
