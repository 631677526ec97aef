"""Large, parallel reads into given memory that bypass the page cache.

The page cache would hold everything twice, and under a memory limit it evicts the pages that are
needed next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edge.offload.errors import StoreCorruptError, StoreError
from edge.offload.files.manifest import piece_digest
from edge.system.files import DIRECT_BYTES, forget_pages, open_direct, open_for_reading, read_into

DEFAULT_THREADS = 6
"""Threads that read. One thread saturates an idle machine's disk with pieces of 4 MiB, but beside
other programs threads wait for a core between pieces: 2 threads reached 0.83 to 0.84 of the disk's
rate on a busy machine, and 6 reached 0.96 to 0.98. With 16 all pieces of two layers are read at
once, both layers arrive at the same moment, and the disk idles until the first is used: 1.2 ms of
every 16, measured with layers of 24 MiB at 3.6 GB/s."""


@dataclass(frozen=True, slots=True)
class Read:
    """Fills `into` from `offset` on. With a digest, the first `nbytes` must have it."""

    offset: int
    into: memoryview
    nbytes: int
    digest: str | None = None


class ReadsUnderWay:
    """Reads that have begun."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Wait for all bytes. Raises StoreError also if the reader was closed before."""
        try:
            for part in self._parts:
                part.result()
        except CancelledError:
            raise StoreError("the weights are no longer read; the model was closed") from None


class DirectReader:
    """One file, read by several threads at once. `close` ends all reads."""

    def __init__(self, path: Path, *, threads: int = DEFAULT_THREADS) -> None:
        """Raises StoreError if the file cannot be opened."""
        self._path = path
        self._mutex = threading.Lock()
        self.bytes_read = 0
        """Bytes read so far, with padding."""
        try:
            direct = open_direct(path)
            self.is_direct = direct is not None
            """Whether reads bypass the page cache; else they are dropped from it afterwards."""
            self._file = open_for_reading(path) if direct is None else direct
            try:
                self._buffered = open_for_reading(path)
            except OSError:
                os.close(self._file)
                raise
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edge-read")

    @property
    def version(self) -> tuple[int, ...]:
        """A version that changes with each write to the file. Takes less than a microsecond."""
        status = os.fstat(self._file)
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def read(self, reads: Iterable[Read]) -> None:
        """Read all of these, in parallel, and wait for all bytes. See `begin`."""
        self.begin(reads).wait()

    def begin(self, reads: Iterable[Read]) -> ReadsUnderWay:
        """Begin these reads after all earlier ones. Does not wait.

        Threads go on from the last pieces of one call to the first of the next without a gap.
        Addresses and sizes of `into` are multiples of DIRECT_BYTES. Reads from other offsets, as of
        small tensors, go through the page cache. Waiting raises StoreCorruptError for bytes without
        their digest or a file that ends early, and StoreError if the disk fails.
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
                count = read_into(file, read.into[done:], read.offset + done)
                before, done = done, done + count
                if done < read.nbytes and done % DIRECT_BYTES:
                    done -= done % DIRECT_BYTES  # direct reads continue only at whole blocks
                if done <= before:
                    raise StoreCorruptError(
                        f"{self._path} ends before byte {read.offset + read.nbytes:,}; the file "
                        "was changed"
                    )
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error
        if not is_direct:
            forget_pages(file, read.offset, size)
        with self._mutex:
            self.bytes_read += size
        if read.digest is not None and piece_digest(read.into[: read.nbytes]) != read.digest:
            raise StoreCorruptError(
                f"{self._path} has other bytes at {read.offset:,} than were written there"
            )
