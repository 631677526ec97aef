"""A program of Edge that reads what others wrote, in a process of its own under limits.

The program answers requests with `edge.system.confinement.serve`. Requests and replies are bytes;
a reply begins with a line of one word, its kind.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.system.confinement import LENGTH_BYTES, TimeLimit
from edge.system.processes import own_session, widen_pipe

_ENVIRONMENT = (
    "GLIBC_TUNABLES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_TIME",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TZ",
)
_KIND_BYTES = 100
"""Bytes of a reply beside its content."""
_JOINED_BYTES = 32 << 10
"""Bytes of a request that is sent in one piece."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a program that reads what others wrote."""

    cpu_s: float
    """Seconds of CPU for one request."""
    wall_s: float
    """Seconds of wall time, for a process that uses no CPU time."""
    memory_bytes: int
    reply_bytes: int


class ConfinedProcess:
    """The process of a program: thread-safe, one request at a time, started on demand."""

    def __init__(self, program: Path, limits: Limits, arguments: Sequence[str] = ()) -> None:
        """program: a file two folders below the folder that has Edge's package. arguments: further
        ones of its own."""
        self._program = program
        self._arguments = tuple(arguments)
        self._limits = limits
        self._mutex = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._stop: weakref.finalize[..., object] | None = None

    @property
    def is_running(self) -> bool:
        """Whether what earlier requests left in the process is still there."""
        return self._running is not None

    def ask(
        self, *request: Buffer, wall_s: float | None = None, reply_bytes: int | None = None
    ) -> tuple[str, bytearray]:
        """The kind of the reply and its content; "exhausted": a limit ended the process.

        request: its parts, which are sent one behind the other. wall_s: another limit of time;
        infinite: the caller ends the process by `kill`. reply_bytes: another limit of the reply.
        """
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        reply_bytes = self._limits.reply_bytes if reply_bytes is None else reply_bytes
        with self._mutex:
            if self._running is None:
                self._start()
            process = self._running
            assert process is not None, "just started"
            if self._is_closed:
                self._end()
                return "exhausted", bytearray()
            try:
                reply = _exchange(process, request, wall_s, reply_bytes)
                end = reply.index(b"\n", 0, _KIND_BYTES)
                kind = reply[:end].decode()
                del reply[: end + 1]  # no copy of what may be large
                return kind, reply
            except (OSError, EOFError, ValueError) as error:
                self._end()
                return "exhausted", bytearray(self._cause(process, error).encode())
            except BaseException:  # the next request must not get this one's reply
                self._end()
                raise

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        with self._mutex:
            self._end()

    def kill(self) -> None:
        """End the process now. A request under way gets "exhausted"."""
        process = self._running
        if process is not None:
            process.kill()

    def forbid(self) -> None:
        """End the process now, and start none any more: requests get "exhausted"."""
        self._is_closed = True  # a start under way looks here once the process is known
        self.kill()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._running = self._stop = None

    def _start(self) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith("PYTHON")
        }
        limits = self._limits
        numbers = map(str, (limits.cpu_s, limits.memory_bytes, limits.reply_bytes))
        self._running = subprocess.Popen(
            [
                *(sys.executable, "-P", str(self._program), *numbers),
                *(str(self._program.parents[2]), *self._arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=kept,
            **own_session(),
        )
        self._stop = weakref.finalize(self, _stop, self._running)
        for pipe in (self._running.stdin, self._running.stdout):
            widen_pipe(pipe)

    def _cause(self, process: subprocess.Popen[bytes], error: Exception) -> str:
        if TimeLimit.ended(process.returncode):
            return f"it takes more than {self._limits.cpu_s} s"
        return str(error) if isinstance(error, ValueError) else ""


def _exchange(
    process: subprocess.Popen[bytes], request: tuple[Buffer, ...], wall_s: float, reply_bytes: int
) -> bytearray:
    """Send a request and read the reply. Raises EOFError or OSError if the process has ended,
    ValueError for an invalid reply."""
    if wall_s == math.inf:
        return _sent_and_read(process, request, reply_bytes)
    is_late = threading.Event()

    def end_it() -> None:
        is_late.set()
        process.kill()

    limit = threading.Timer(wall_s, end_it)  # not every system can wait for pipes so
    limit.daemon = True
    limit.start()
    try:
        return _sent_and_read(process, request, reply_bytes)
    except (EOFError, OSError):
        if is_late.is_set():
            raise ValueError(f"it did not answer within {wall_s:.0f} s") from None
        raise
    finally:
        limit.cancel()


def _sent_and_read(
    process: subprocess.Popen[bytes], request: tuple[Buffer, ...], reply_bytes: int
) -> bytearray:
    requests, replies = process.stdin, process.stdout
    assert requests is not None, "a pipe"
    assert replies is not None, "a pipe"

    def read(count: int) -> bytearray:
        content = bytearray(count)
        rest = memoryview(content)
        while rest:
            read = replies.readinto(rest)  # type: ignore[attr-defined]  # a raw file
            if not read:
                raise EOFError
            rest = rest[read:]
        rest.release()  # else the content could not be shortened
        return content

    whole = sum(map(len, request))
    parts: tuple[Buffer, ...] = (whole.to_bytes(LENGTH_BYTES, "little"), *request)
    if whole <= _JOINED_BYTES:  # one call of the system, and the process wakes once
        parts = (b"".join(parts),)
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[requests.write(rest) :]
    length = int.from_bytes(read(LENGTH_BYTES), "little")
    if length > reply_bytes + _KIND_BYTES:
        raise ValueError(f"it gives {length:,} bytes, and {reply_bytes:,} are the most")
    return read(length)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes its pipes and waits for it
        process.kill()
