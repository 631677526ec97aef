"""A lock for the only process that writes into a folder."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edge.offload import disk_errors_as_store_errors
from edge.system.locks import lock_now

WRITER_LOCK = ".writer"
_LOCK_RETRY_S = 0.1
_TOLD_AFTER_TRIES = 20

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def only_writer(folder: Path, while_waiting: Callable[[], object]) -> Iterator[None]:
    """Wait until no other process writes into `folder`. The kernel frees a dead process's lock.

    while_waiting: called repeatedly, perhaps for minutes; may raise to give up. A warning is logged
    after two seconds. Unfinished files of a dead writer are removed. Raises StoreError.
    """
    with contextlib.ExitStack() as held:
        with disk_errors_as_store_errors(folder):
            lock = held.enter_context((folder / WRITER_LOCK).open("ab", buffering=0))
        for tries in itertools.count(1):
            if lock_now(lock.fileno()):
                break
            if tries == _TOLD_AFTER_TRIES:
                _log.warning("waiting for another process that writes into %s", folder)
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
            return not lock_now(lock.fileno())
    except FileNotFoundError:
        return False
