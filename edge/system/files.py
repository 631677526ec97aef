"""Files by descriptor: reads and writes at a place, direct reads, advice about pages, privacy.

Descriptors are used from several threads, so a read at a place must not move a position that others
use. Where the system has no such read, a lock makes seek and read one step.
"""

import contextlib
import errno
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

from edge.system.kind import PORTABLE

DIRECT_BYTES = 4096
"""Offsets, sizes and addresses of direct reads are multiples of this."""

_READING = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
_NOT_BY_LINK = getattr(os, "O_NOFOLLOW", 0)
_MOST_SCRATCH_BYTES = 16 << 20

_place = threading.Lock()
"""Held while a descriptor's position is moved and used."""


def open_for_reading(path: str | Path, flags: int = 0) -> int:
    """A descriptor for reading bytes. It never waits, as it would for the writer of a pipe."""
    return os.open(path, _READING | _AT_ONCE | flags)


def open_private(path: Path, flags: int) -> int:
    """A descriptor with further `flags` of `os.open`, which does not follow a link at the path and
    never waits. A new file is its owner's alone."""
    flags |= _NOT_BY_LINK | _AT_ONCE | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o600)


def open_direct(path: Path) -> int | None:
    """A descriptor whose reads bypass the page cache; None where the system or the file system, as
    one in memory, has no such reads. Raises OSError for other failures."""
    if sys.platform == "linux" and not PORTABLE:
        try:
            return os.open(path, _READING | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return None


def read_into(descriptor: int, into: memoryview, offset: int) -> int:
    """Read at most len(into) bytes from `offset` on. Returns their number, 0 at the file's end."""
    if sys.platform != "win32" and not PORTABLE:
        return os.preadv(descriptor, [into], offset)
    content = read_at(descriptor, min(len(into), _MOST_SCRATCH_BYTES), offset)
    into[: len(content)] = content
    return len(content)


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """At most `count` bytes from `offset` on."""
    if sys.platform != "win32" and not PORTABLE:
        return os.pread(descriptor, count, offset)
    with _place:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)


def write_at(descriptor: int, content: bytes | memoryview, offset: int) -> int:
    """Write bytes at `offset`. Returns how many were written."""
    if sys.platform != "win32" and not PORTABLE:
        return os.pwrite(descriptor, content, offset)
    with _place:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, content)


def forget_pages(descriptor: int, offset: int = 0, num_bytes: int = 0) -> None:
    """Say that these bytes need not stay in the page cache. num_bytes 0: to the file's end."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def read_ahead(descriptor: int, offset: int, num_bytes: int) -> None:
    """Say that these bytes are read next."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)


def expect_random_reads(descriptor: int) -> None:
    """Say that neighbours of read bytes are not needed."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give a file room for bytes to be written. Raises OSError (ENOSPC) where the disk is too full.

    Where the system cannot reserve room, what is free now is compared, and the file made longer.
    """
    if sys.platform == "linux" and not PORTABLE:
        os.posix_fallocate(descriptor, offset, num_bytes)
        return
    grown = offset + num_bytes - os.fstat(descriptor).st_size
    if grown > 0:
        if sys.platform != "win32":
            free = os.fstatvfs(descriptor)
            if grown > free.f_bavail * free.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, offset + num_bytes)


def nameless_file(folder: Path) -> int:
    """A descriptor for a new file without a name, which vanishes with this process.

    Raises OSError.
    """
    if sys.platform == "linux" and not PORTABLE:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}:
                raise
    if sys.platform == "win32":
        path = folder / f".unnamed-{os.urandom(8).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_BINARY
        return os.open(path, flags | os.O_TEMPORARY, 0o600)  # removed when it is closed
    descriptor, name = tempfile.mkstemp(prefix=".unnamed-", dir=folder)
    Path(name).unlink()
    return descriptor


def memory_file() -> int:
    """A descriptor for a new file without a name, in memory where the system has that: a full disk
    loses nothing that is written to it."""
    if sys.platform == "linux" and not PORTABLE:
        return os.memfd_create("edge")
    return nameless_file(Path(tempfile.gettempdir()))


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` durable; Windows does so by itself."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_private(descriptor: int, mode: int) -> None:
    """Set a file's permissions. On Windows the folder's apply, which are the user's alone."""
    if sys.platform != "win32":
        os.fchmod(descriptor, mode)


def is_own(status: os.stat_result, *, or_root: bool = False) -> bool:
    """Whether the file belongs to the user of this process."""
    if sys.platform == "win32":
        return True  # the folders of a user's settings and caches are that user's
    return status.st_uid == os.geteuid() or (or_root and status.st_uid == 0)


def others_may(status: os.stat_result, permissions: int) -> bool:
    """Whether other users have any of these `permissions`, such as 0o077 or 0o022."""
    return sys.platform != "win32" and bool(stat.S_IMODE(status.st_mode) & permissions)


def disk_bytes(status: os.stat_result) -> int:
    """Bytes of a file on disk, without its holes where the system counts blocks."""
    if sys.platform == "win32":
        return status.st_size
    return status.st_blocks * 512
