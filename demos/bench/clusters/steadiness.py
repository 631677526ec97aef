"""How fast the machine itself is at the moment, by work that is none of Edge's.

A virtual machine is slower for seconds, or for a minute, when others use what lies below it, and a
prediction made or checked then is off by that, whatever the planner does. So the machine is timed
before and after the devices measure themselves, and before and after the answers of every plan.
Both begin when the machine is quiet, and what it was not quiet after is done again. What came out
is not looked at for that.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
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

MOST_SLOWER = 0.05
"""Than when it is quiet; the timings of a quiet machine lie closer together."""

FEWEST = 40
"""Timings that tell what quiet is: their fastest tenth."""

MOST_KEPT = 400
"""Older ones are forgotten: some changes last."""

MOST_WAITED = 16
"""Timings until nobody waits any longer: some seconds."""


class Machine:
    """Times the same work on the given cores at once, again and again."""

    def __init__(self, cores: Iterable[int]) -> None:
        self._cores = tuple(dict.fromkeys(cores))
        self._kept: deque[float] = deque(maxlen=MOST_KEPT)
        self._memory = [np.ones(READ_BYTES // 8) for _ in self._cores]
        self._square = np.ones((PRODUCT_ROWS, PRODUCT_ROWS))

    def time_s(self) -> float:
        """Seconds that one round takes now: of the fastest fifth, on the slowest core."""
        with ThreadPoolExecutor(len(self._cores)) as threads:
            now_s = max(threads.map(self._rounds_s, self._cores, self._memory))
        self._kept.append(now_s)
        return now_s

    def is_quiet(self, now_s: float) -> bool:
        """Whether a round that takes `now_s` takes no longer than it mostly can."""
        return now_s <= (1 + MOST_SLOWER) * float(np.quantile(self._kept, 0.1))

    def wait(self) -> float:
        """Until it is quiet, or not for some seconds; what a round takes then."""
        while len(self._kept) < FEWEST:
            self.time_s()
        for _ in range(MOST_WAITED):
            now_s = self.time_s()
            if self.is_quiet(now_s):
                break
        return now_s

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
