"""Huge pages and settings of malloc for fast reading of weights. Linux only.

Every function is a hint: without support of the system, only speed differs.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from edge.system.kind import PORTABLE
from edge.system.pages import HUGE_PAGE_BYTES, advise_at

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MOST_MMAP_THRESHOLD = 32 << 20
"""glibc's maximum of the threshold in bytes from which allocations are mapped."""

_MADV_COLLAPSE = 25
"""Since Linux 6.1: make huge pages now, also in the system's mode madvise."""

_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$")
_MOSTLY = 0.9
"""Least resident part to collapse: collapsing fills holes, and reserved KV memory is all holes."""


_TUNABLES = "GLIBC_TUNABLES"
_HUGE_FROM_MALLOC = "glibc.malloc.hugetlb=1"
"""Since glibc 2.35: malloc uses huge pages in the system's mode madvise."""
_ONE_ARENA = "glibc.malloc.arena_max=1"
"""One heap for all threads, because with its own each thread would keep its freed memory."""


def with_malloc_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a daemon, with huge pages from the start and one heap.

    A model loads two to three times as fast as with pages of 4 KiB that are collapsed later (1.1 B
    weights in 4 bits: 0.5 to 0.8 s against 1.5 to 3). One heap avoids freed memory in each thread,
    which took a peer of 256 MiB beyond its limit. Existing settings stay. Only glibc reads them.
    """
    changed = dict(environment)
    for setting in (_HUGE_FROM_MALLOC, _ONE_ARENA):
        known = changed.get(_TUNABLES, "")
        if setting.partition("=")[0] not in known:
            changed[_TUNABLES] = f"{known}:{setting}" if known else setting
    return changed


def restart_with_malloc_settings() -> None:
    """Restart this process with a daemon's malloc settings, unless it has them.

    glibc reads the settings once, before Python runs. The process keeps its id and its streams.
    """
    changed = with_malloc_settings(os.environ)
    if _libc() is not None and platform.libc_ver()[0] == "glibc" and changed != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, changed)  # noqa: S606 - itself, unchanged


def keep_allocations_together() -> None:
    """Have glibc grow one heap instead of mapping every large allocation by itself.

    Weights then are adjacent, and huge pages cover them: a third of many mappings of a few MiB
    would be borders too short for a huge page. Call it before large allocations.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)


def use_huge_pages() -> int:
    """Back large anonymous memory with huge pages; returns the bytes that are.

    A decode step reads every weight once, with a page table walk for each page of 4 KiB. Call it
    after the weights are loaded: it moves memory at 1 GB/s or more.
    """
    libc = _libc()
    if libc is None:
        return 0
    done = 0
    for start, end in _anonymous_mappings():
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        size = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
        if size <= 0:
            continue
        address, length = ctypes.c_void_p(first), ctypes.c_size_t(size)
        resident = ctypes.create_string_buffer(size // mmap.PAGESIZE)
        if libc.mincore(address, length, resident) != 0:
            continue
        if resident.raw.count(1) < _MOSTLY * len(resident):
            continue
        if libc.madvise(address, length, _MADV_COLLAPSE) == 0:
            done += size
    return done


def ask_for_huge_pages() -> None:
    """Use huge pages for later allocations again, after `leave_holes`."""
    if _HUGE_FROM_MALLOC in os.environ.get(_TUNABLES, ""):
        for start, end in _anonymous_mappings(heap_only=True):
            advise_at(start, end - start, "huge")


def leave_holes() -> None:
    """Keep the kernel from filling memory that loading freed. Call it after the release.

    With huge pages, the kernel turns memory with any used page of 4 KiB into a huge page, minutes
    later: a process with weight offload then took 100 MiB more.
    """
    libc = _libc()
    if libc is None:
        return
    for start, end in _anonymous_mappings(heap_only=True):
        resident = ctypes.create_string_buffer((end - start) // mmap.PAGESIZE)
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), resident) != 0:
            continue
        pages, hole = resident.raw, start
        for first in range(-(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end, HUGE_PAGE_BYTES):
            last = first + HUGE_PAGE_BYTES
            page = pages[(first - start) // mmap.PAGESIZE : (last - start) // mmap.PAGESIZE]
            if last <= end and page.count(1) >= _MOSTLY * len(page):
                _leave_hole(hole, first)
                hole = last
        _leave_hole(hole, end)


def _leave_hole(start: int, end: int) -> None:
    if end > start:
        advise_at(start, end - start, "not huge")


def release_freed_memory() -> None:
    """Return memory that loading freed to the system; glibc would keep 200 to 300 MB of it."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def _libc() -> ctypes.CDLL | None:
    """The C library of Linux; None on other systems."""
    return ctypes.CDLL(None) if sys.platform == "linux" and not PORTABLE else None


def _anonymous_mappings(*, heap_only: bool = False) -> list[tuple[int, int]]:
    """(start, end) of private anonymous memory, in use or reserved."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8") as lines:
        for line in lines:
            match = _ANONYMOUS.match(line)
            if match and (match[3] or not heap_only):
                found.append((int(match[1], 16), int(match[2], 16)))
            elif found and heap_only and not line.endswith("[heap]\n"):
                break  # the heap is one mapping, and there may be thousands
    return found
