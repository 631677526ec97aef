"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

WANTED_DESCRIPTORS = 4096
"""More than a daemon's limits come to: 512 connections, as many links, 64 sessions with files."""


def allow_descriptors(wanted: int = WANTED_DESCRIPTORS) -> None:
    """As many as that, as far as the system lets this process: 1,024 are usual, and a few plans of
    many devices take them all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may know no such call
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
