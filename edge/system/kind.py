"""Whether this process keeps to what every system has."""

import os
import sys
from typing import Final

PORTABLE: Final = bool(os.environ.get("EDGE_PORTABLE"))
"""True: the ways that exist on every system are used also where this one has better ones. For tests
of those ways on Linux."""


def usual_service_manager() -> str:
    """The program that starts services on this kind of system: systemd, launchd or
    task-scheduler."""
    if sys.platform == "win32":
        return "task-scheduler"
    return "launchd" if sys.platform == "darwin" else "systemd"
