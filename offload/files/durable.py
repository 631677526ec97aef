"""Writes that are complete or raise, some of them durable: they survive a loss of power."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from edge.offload.errors import StoreError, StoreFullError
from edge.system.files import make_private, sync_folder, write_at


@contextlib.contextmanager
def disk_errors_as_store_errors(path: Path) -> Iterator[None]:
    """Raises StoreFullError for a full disk or quota, StoreError for other errors of the disk or
    folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreError(
                f"{path} cannot be used: {error.strerror or error}; repair its permissions or its "
                "disk, or use another folder"
            ) from error
        raise StoreFullError(
            f"the disk is full and {path} cannot grow; free some room and try again, the bytes so "
            "far are kept"
        ) from error


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of `content` at `offset` of the file."""
    while content:
        count = write_at(descriptor, content, offset)
        content = content[count:]
        offset += count


def write_durably(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write the file durably, or keep its old content.

    mode: permissions from the beginning; None: by the process's umask. A killed process leaves
    `<name>.partial`. Raises StoreError.
    """
    draft = path.with_name(f"{path.name}.partial")
    with disk_errors_as_store_errors(path):
        try:
            with draft.open("wb", buffering=0) as file:
                if mode is not None:
                    make_private(file.fileno(), mode)
                write_all(file.fileno(), memoryview(content), 0)
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def rename_durably(path: Path, target: Path) -> None:
    """Rename a file or folder within its folder, durably. Raises StoreError."""
    with disk_errors_as_store_errors(target):
        path.rename(target)
        sync_folder(target.parent)
