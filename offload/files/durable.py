"""Writing that is complete or an error, and survives a loss of power when it says so."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from offload.errors import StoreError, StoreFullError


@contextlib.contextmanager
def disk_errors_as_store_errors(path: Path) -> Iterator[None]:
    """Raises StoreFullError where the disk or a quota has no more room, StoreError where the disk
    or the folder fails otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreError(
                f"{path} cannot be used: {error.strerror or error}; mend its permissions or its "
                "disk, or keep the cache in another folder"
            ) from error
        raise StoreFullError(
            f"the disk is full, {path} cannot grow; free some room and try again: what has arrived "
            "is kept"
        ) from error


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Writes all of `content` at `offset` of the file."""
    while content:
        count = os.pwrite(descriptor, content, offset)
        content = content[count:]
        offset += count


def sync_folder(folder: Path) -> None:
    """Makes renames within `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
