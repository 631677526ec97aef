"""Writing that is complete or an error, and survives a loss of power when it says so."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from edge.offload.errors import StoreError, StoreFullError


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
                "disk, or use another folder"
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


def write_durably(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write the file, or keep its old content; it survives a loss of power.

    mode: permissions from the beginning; None: as the process's umask says. A killed process leaves
    `<name>.partial`. Raises StoreError.
    """
    draft = path.with_name(f"{path.name}.partial")
    with disk_errors_as_store_errors(path):
        try:
            with draft.open("wb", buffering=0) as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                write_all(file.fileno(), memoryview(content), 0)
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def rename_durably(path: Path, target: Path) -> None:
    """Give a file or folder another name in its folder, which survives a loss of power.

    Raises StoreError.
    """
    with disk_errors_as_store_errors(target):
        path.rename(target)
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames within `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
