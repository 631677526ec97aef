"""Errors of the adapter, which WebGPU reports nowhere but in its log.

A buffer that cannot be allocated, or a graph that cannot be submitted, raises nothing: the provider
writes a line and goes on, and results are those of an earlier step. So what is written to the
standard error during a call is read before its results are used; it is passed on if no error of
the adapter is in it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from edge.errors import CapacityError, DeviceLostError
from edge.system.files import memory_file

AFTER_A_FAILURE = "if it stays so, start the peer again"

_STDERR = 2
_MOST_BYTES = 1 << 16
"""Bytes of the log that are searched. One error brings many others, and the first one counts."""

_ERROR = re.compile(rb"WebGPU device (?:error\((?P<kind>\d+)\)|lost \([^)]*\)): *(?P<why>[^\n]*)")
_OUT_OF_MEMORY = b"3"
"""Dawn's number of this kind of error."""


class ErrorLog:
    """Watches the standard error of this process. Used with the device's lock held."""

    def __init__(self) -> None:
        self._descriptor = -1
        """A file without a name, for the life of the process; −1: not opened yet."""
        self._depth = 0

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Raises CapacityError if the adapter (`name`) had no memory during the context, and
        DeviceLostError for other errors of it."""
        if self._depth:  # the outer context sees it
            yield
            return
        if self._descriptor < 0:
            self._descriptor = memory_file()
        self._depth += 1
        stderr = _duplicate()
        try:
            os.dup2(self._descriptor, _STDERR)
            yield
        finally:
            os.dup2(stderr, _STDERR)
            self._depth -= 1
            written = self._taken()
            error = _error_in(written, name) if written else None
            if written and error is None:
                with contextlib.suppress(OSError):
                    os.write(stderr, written)
            os.close(stderr)
            if error is not None:
                raise error

    def _taken(self) -> bytes:
        """The beginning of the text that was written, which is removed."""
        descriptor = self._descriptor
        if not os.lseek(descriptor, 0, os.SEEK_CUR):
            return b""
        os.lseek(descriptor, 0, os.SEEK_SET)
        written = os.read(descriptor, _MOST_BYTES)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return written


def _duplicate() -> int:
    """A copy of the standard error's descriptor; of an empty device where a process has none."""
    try:
        return os.dup(_STDERR)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _error_in(written: bytes, name: str) -> Exception | None:
    found = _ERROR.search(written)
    if found is None:
        return None
    why = found["why"].decode("utf-8", "replace").strip()
    if found["kind"] == _OUT_OF_MEMORY:
        return CapacityError(
            f"the graphics adapter ({name}) has no memory left: {why}",
            remedy="end other programs that use it, give the peer less --memory, or share the "
            "model with more peers",
        )
    return DeviceLostError(f"the graphics adapter ({name}) failed: {why}", remedy=AFTER_A_FAILURE)
