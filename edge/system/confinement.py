"""Limits that a process sets itself before it runs a program of others.

Imported by a process that shall start quickly: nothing but the standard library.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

LENGTH_BYTES = 8

Part = bytes | memoryview


def read_time_zone() -> None:
    """Read the zone's file now: a confined process may not open it later."""
    if sys.platform != "win32":
        time.tzset()


def held_bytes() -> int:
    """Bytes of addresses that this process has now; 0 where no such limit is kept."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - no further import
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def confine(memory_bytes: int, file_bytes: int = 0) -> None:
    """Forbid this process to write files and start processes, and limit its memory.

    file_bytes: the size of a file that it may write.

    macOS does not keep a process to a limit of its memory, and Windows has no such limits that a
    process sets itself: there the limits of time and of output remain.
    """
    if sys.platform == "win32":
        return
    import resource

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for limit, wanted in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise


class TimeLimit:
    """Ends this process when it computes for longer than `seconds` between `start` and `stop`."""

    EXIT_CODE = 124
    """The exit code of an ended process where no signal says it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, self._seconds)  # its signal kills the process
        else:
            self._timer = threading.Timer(self._seconds, os._exit, (self.EXIT_CODE,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        elif self._timer is not None:
            self._timer.cancel()

    @classmethod
    def ended(cls, exit_code: int | None) -> bool:
        """Whether a process with this exit code was ended by its limit."""
        if sys.platform != "win32":
            return exit_code == -signal.SIGPROF
        else:  # noqa: RET505 - a checker for one system takes the rest for unreachable
            return exit_code == cls.EXIT_CODE


def serve(
    answer: Callable[[bytes], Part | Sequence[Part]], *, beside_bytes: int = 0, file_bytes: int = 0
) -> None:
    """Answer each request on standard input on standard output, both after their length, under the
    limits in the arguments of this process: seconds for a request, and bytes of memory. An answer
    may come in parts.

    beside_bytes: addresses that do not count. file_bytes: see `confine`.
    """
    confine(int(sys.argv[2]) + beside_bytes, file_bytes)
    limit = TimeLimit(float(sys.argv[1]))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(LENGTH_BYTES):
        request = requests.read(int.from_bytes(head, "little"))
        limit.start()
        reply = answer(request)
        limit.stop()
        parts = (reply,) if isinstance(reply, Part) else reply
        replies.write(sum(map(len, parts)).to_bytes(LENGTH_BYTES, "little"))
        for part in parts:
            replies.write(part)
        replies.flush()
