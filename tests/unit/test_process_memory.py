"""Hints to the system about memory: they never harm, and never fill reserved memory."""

from __future__ import annotations

import mmap

import numpy as np

from edge.backends.process_memory import release_freed_memory, use_huge_pages
from offload import KVPool


def resident_bytes() -> int:
    with open("/proc/self/statm") as statistics:  # noqa: PTH123 - a kernel file
        return int(statistics.read().split()[1]) * mmap.PAGESIZE


def test_contents_stay_and_reserved_memory_stays_empty() -> None:
    weights = np.arange(1 << 22, dtype=np.float32)
    pool = KVPool(num_layers=2, slots=8, num_kv_heads=4, context_tokens=4096, head_size=64)
    before = resident_bytes()
    assert use_huge_pages() >= 0
    release_freed_memory()
    assert resident_bytes() - before < 32 << 20
    assert (weights == np.arange(1 << 22, dtype=np.float32)).all()
    pool.close()
