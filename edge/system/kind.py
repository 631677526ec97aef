"""Whether this process keeps to what every system has."""

import os
import platform
import sys
from typing import Final

PORTABLE: Final = os.environ.get("EDGE_PORTABLE", "0") not in ("", "0")
"""True: the ways that exist on every system are used also where this one has better ones. For tests
of those ways on Linux."""


def usual_service_manager() -> str:
    """The program that starts services on this kind of system: systemd, launchd or
    task-scheduler."""
    if sys.platform == "win32":
        return "task-scheduler"
    return "launchd" if sys.platform == "darwin" else "systemd"


def why_no_wheels() -> str | None:
    """Why the packages that Edge needs have no wheels for this Python; None: they have."""
    if sys.maxsize < 1 << 32:
        return "this Python has 32 bits, and there are packages for 64 bits only"
    if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        return "this system has no glibc (as Alpine), and there are packages for glibc only"
    return None
