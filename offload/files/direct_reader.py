"""Reads into given memory that bypass the page cache: large and parallel.

The page cache would hold everything twice, and under a memory limit it evicts the pages needed
next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edge.offload.errors import StoreCorruptError, StoreError
from edge.offload.files.manifest import piece_digest

DIRECT_BYTES = 4096
"""Offsets, sizes and addresses of direct reads are multiples of this."""

DEFAULT_THREADS = 6
"""One thread fills an idle machine's disk with pieces of 4 MiB, but next to other programs threads
wait for a core between their pieces. With 16 all pieces of two layers are under way at once, so
both are there at the same moment, and the disk has nothing to do until the first is used: 1.2 ms in
every 16, measured with layers of 24 MiB at 3.6 GB/s. With 2 it ran at 0.83 to 0.84 of its rate on a
busy machine, with 6 at 0.96 to 0.98."""


@dataclass(frozen=True, slots=True)
class Read:
    """`into` is filled from `offset` on; with a digest the first `nbytes` must be what it names."""

    offset: int
    into: memoryview
    nbytes: int
    digest: str | None = None


class ReadsUnderWay:
    """Reads that are under way."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Until every byte is there. Raises StoreError also if the reader was closed before."""
        try:
            for part in self._parts:
                part.result()
        except CancelledError:
            raise StoreError("the weights are no longer read; the model was closed") from None


class DirectReader:
    """One file, read by several threads at once. `close` ends what is under way."""

    def __init__(self, path: Path, *, threads: int = DEFAULT_THREADS) -> None:
        """Raises StoreError if the file cannot be opened."""
        self._path = path
        self._mutex = threading.Lock()
        self.is_direct = True
        """Whether the page cache is left out; else what was read is dropped from it."""
        self.bytes_read = 0
        """Since the reader was made, padding included."""
        try:
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system in memory has no direct reads
                    raise
                self.is_direct = False
                self._file = os.open(path, os.O_RDONLY)
            try:
                self._buffered = os.open(path, os.O_RDONLY)
            except OSError:
                os.close(self._file)
                raise
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edge-read")

    @property
    def version(self) -> tuple[int, ...]:
        """Another one after each write to the file; takes less than a microsecond."""
        status = os.fstat(self._file)
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def read(self, reads: Iterable[Read]) -> None:
        """All of them, in parallel; returns when every byte is there. See `begin`."""
        self.begin(reads).wait()

    def begin(self, reads: Iterable[Read]) -> ReadsUnderWay:
        """Have all of them read, after those that were begun before; does not wait.

        The threads go from the last pieces of one reading to the first of the next without a gap.
        Addresses and sizes of `into` are multiples of DIRECT_BYTES; reads from other offsets, which
        only small things have, go through the page cache. Waiting raises StoreCorruptError for
        bytes that are not what their digest says, or a file that ends early; StoreError if the disk
        fails.
        """
        return ReadsUnderWay([self._pool.submit(self._read_one, each) for each in reads])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)
        os.close(self._buffered)

    def _read_one(self, read: Read) -> None:
        done, size = 0, len(read.into)
        is_direct = self.is_direct and not read.offset % DIRECT_BYTES
        file = self._file if is_direct else self._buffered
        try:
            while done < read.nbytes:
                count = os.preadv(file, [read.into[done:]], read.offset + done)
                before, done = done, done + count
                if done < read.nbytes and done % DIRECT_BYTES:
                    done -= done % DIRECT_BYTES  # a direct read goes on at a whole block only
                if done <= before:
                    raise StoreCorruptError(
                        f"{self._path} ends before byte {read.offset + read.nbytes:,}; it is not "
                        "the file that was written"
                    )
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error
        if not is_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, read.offset, size, os.POSIX_FADV_DONTNEED)
        with self._mutex:
            self.bytes_read += size
        if read.digest is not None and piece_digest(read.into[: read.nbytes]) != read.digest:
            raise StoreCorruptError(
                f"{self._path} has other bytes at {read.offset:,} than were written there"
            )
