"""The memory read rate of this device, which limits decoding: each token reads every weight."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES_PER_THREAD = 128 << 20
"""Bytes per array, far above any cache."""

_ROUNDS = 5


_LEAST_BYTES = 1 << 20


def most_read_bytes(threads: int) -> int:
    """The preferred size of the measurement; with less, it may measure caches instead."""
    return threads * _BYTES_PER_THREAD


def memory_read_bytes_per_s(threads: int, memory_bytes: int) -> float:
    """The best of a few rounds in which `threads` threads each read an array of their own.

    The arrays have `memory_bytes` together, or the least measurable size.

    An OR over 64-bit words: one load and one cheap operation a word, so memory decides (on the
    machine this was written on it reads as fast as a dot product, and faster than a sum).
    """
    each_bytes = max(_LEAST_BYTES, min(_BYTES_PER_THREAD, memory_bytes // threads))
    arrays = [np.ones(each_bytes // 8, np.uint64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start_s = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best = max(best, threads * each_bytes / (time.perf_counter() - start_s))
    return best
