"""This process and those that it starts: cores, user, memory, limits and sessions of their own."""

import os
import sys
from typing import IO, Any

import psutil

from edge.system.kind import PORTABLE

_WIDE_PIPE_BYTES = 1 << 20
"""The most that Linux allows every user."""


def allowed_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    if sys.platform == "linux" and not PORTABLE:
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def user_number() -> str:
    """The user's number for people, where the system numbers users."""
    if sys.platform == "win32":
        return ""
    return str(os.getuid())


def peak_memory_bytes() -> int:
    """The most memory of this process that was resident at once."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak << 10)  # macOS counts bytes


def shared_memory_bytes(memory: Any) -> int:
    """Resident bytes that belong to files, of psutil's `memory_info`; 0 where it does not tell."""
    return int(getattr(memory, "shared", 0))


def yield_core() -> None:
    """Let another thread run for a moment, if one waits for this core."""
    if sys.platform == "linux" and not PORTABLE:
        os.sched_yield()
    else:
        import time

        time.sleep(0)


def widen_pipe(pipe: IO[bytes] | None) -> None:
    """Let a pipe hold as much as the system allows: with less, both ends take turns for every
    64 KiB. Linux alone has this."""
    if sys.platform == "linux" and pipe is not None:
        import contextlib
        import fcntl

        with contextlib.suppress(OSError):  # too many pipes of this user are wide
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _WIDE_PIPE_BYTES)


def own_session() -> dict[str, Any]:
    """Arguments of subprocess.Popen for a process that a Ctrl-C of this terminal does not reach."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}
