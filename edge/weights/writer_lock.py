"""A lock for the only process that writes into a folder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edge.offload import disk_errors_as_store_errors

WRITER_LOCK = ".writer"
_LOCK_RETRY_S = 0.1


@contextlib.contextmanager
def only_writer(folder: Path, while_waiting: Callable[[], object]) -> Iterator[None]:
    """Wait until no other process writes into `folder`. The kernel frees a dead process's lock.

    while_waiting: called repeatedly, perhaps for minutes; may raise to give up. Unfinished files of
    a dead writer are removed. Raises StoreError.
    """
    with contextlib.ExitStack() as held:
        with disk_errors_as_store_errors(folder):
            lock = held.enter_context((folder / WRITER_LOCK).open("ab", buffering=0))
        while not _lock_now(lock.fileno()):
            while_waiting()
            time.sleep(_LOCK_RETRY_S)
        with disk_errors_as_store_errors(folder):
            for leftover in folder.glob("*.partial"):
                leftover.unlink()
        yield


def is_written(folder: Path) -> bool:
    """Whether a process writes into `folder` now."""
    try:
        with (folder / WRITER_LOCK).open("rb", buffering=0) as lock:
            return not _lock_now(lock.fileno())
    except FileNotFoundError:
        return False


def _lock_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
