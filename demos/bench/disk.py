"""What a disk gives: one file read from the start, past the page cache, by several threads."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 4 << 20
MOST_BYTES = 1 << 30
HUGE_PAGE_BYTES = 2 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def direct_read_rate(
    path: Path, *, threads: int, piece_bytes: int = PIECE_BYTES, most_bytes: int = MOST_BYTES
) -> float:
    """Bytes per second. Raises OSError where the file system has no direct reads."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        end = min(os.fstat(descriptor).st_size, most_bytes)
        offsets = itertools.count(0, piece_bytes)  # next() of it is one step for all threads
        size = threads * piece_bytes + HUGE_PAGE_BYTES
        with mmap.mmap(-1, size, flags=PRIVATE) as memory:
            # Shared memory, or none asked for, comes in pages of 4 KiB: a third of the rate here.
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.write(bytes(len(memory)))  # they are there before the clock runs
            first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES

            def work(number: int) -> int:
                start, done = first + number * piece_bytes, 0
                with memoryview(memory) as whole, whole[start : start + piece_bytes] as buffer:
                    while (offset := next(offsets)) < end:
                        done += os.preadv(descriptor, [buffer], offset)
                return done

            with ThreadPoolExecutor(threads) as pool:
                start_s = time.perf_counter()
                done = sum(pool.map(work, range(threads)))
                return done / (time.perf_counter() - start_s)
    finally:
        os.close(descriptor)


def disk_rate(path: Path, *, threads: Sequence[int] = (1, 4, 8)) -> float:
    """The most that any of these numbers of threads gets."""
    return max(direct_read_rate(path, threads=count) for count in threads)


def drop_page_cache() -> None:
    """Forget every file that is in memory and not in use. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
