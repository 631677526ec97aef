"""How fast the machine itself is at the moment, by work that is none of Edge's.

A prediction made on a machine that then changes its speed is off by that, whatever the planner
does. So the machine is timed beside the devices: around what they measure of themselves, and after
every answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

READ_BYTES = 64 << 20
"""More than a cache holds: decoding reads memory."""

PRODUCTS = 3
PRODUCT_ROWS = 192
"""And computes, in about the same time. Not by the linear algebra library, which has threads."""

ROUNDS = 40
"""Half a second."""


class Machine:
    """Times the same work on the given cores at once, again and again."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(dict.fromkeys(cores))
        self._memory = [np.ones(READ_BYTES // 8) for _ in self._cores]
        self._square = np.ones((PRODUCT_ROWS, PRODUCT_ROWS))

    def time_s(self) -> float:
        """Seconds that one round takes now: of the fastest fifth, on the slowest core."""
        with ThreadPoolExecutor(len(self._cores)) as threads:
            return max(threads.map(self._rounds_s, self._cores, self._memory))

    def _rounds_s(self, core: int, memory: NDArray[Any]) -> float:
        os.sched_setaffinity(0, {core})  # of this thread alone
        found: list[float] = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            memory.sum()
            for _ in range(PRODUCTS):
                np.einsum("ij,jk->ik", self._square, self._square)
            found.append(time.perf_counter() - start_s)
        return float(np.quantile(found, 0.2))


def drift(measured_s: Sequence[float], answered_s: Sequence[float]) -> float:
    """By how much the machine took longer when it answered than when it was measured.

    0.1 for a tenth longer, of the medians.
    """
    return float(np.median(answered_s) / np.median(measured_s) - 1)
