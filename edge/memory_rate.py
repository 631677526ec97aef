"""How fast this device reads memory: the limit of decoding, where each token reads every weight."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES_PER_THREAD = 128 << 20
"""Far above any cache."""

_ROUNDS = 5


def memory_read_bytes_per_s(threads: int) -> float:
    """The best of a few rounds in which `threads` threads each read an array of their own.

    An OR over 64-bit words: one load and one cheap operation a word, so memory decides (on the
    machine this was written on it reads as fast as a dot product, and faster than a sum).
    """
    arrays = [np.ones(_BYTES_PER_THREAD // 8, np.uint64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start_s = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best = max(best, threads * _BYTES_PER_THREAD / (time.perf_counter() - start_s))
    return best
