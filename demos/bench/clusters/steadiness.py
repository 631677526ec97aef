"""How fast the machine itself is at the moment, by work that is none of Edge's.

A prediction made on a machine that then changes its speed is off by that, whatever the planner
does. So the machine is timed beside the devices: before and after what they measure of themselves,
and before and after the answers of every plan. What was measured or answered while it was not as
fast as it was is done again; what came out is not looked at for that.
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

MOST_DRIFT = 0.04
"""As fast as before: a quiet machine's timings lie this close together."""

SETTLED = 3
"""So many timings that agree, one after the other, are the machine's speed."""

MOST_TIMINGS = 60
"""To find it, or to wait for it: most of a minute."""


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

    def settled_s(self) -> float:
        """The same when it has stopped changing; the median of the last ones where it does not."""
        found: list[float] = []
        for _ in range(MOST_TIMINGS):
            found.append(self.time_s())
            last = found[-SETTLED:]
            if len(last) == SETTLED and all(is_as_fast(each, last[0]) for each in last):
                break
        return float(np.median(found[-SETTLED:]))

    def wait_until(self, usual_s: float) -> float:
        """Until a round takes `usual_s` again, or not for most of a minute; what it takes now."""
        for _ in range(MOST_TIMINGS - 1):
            now_s = self.time_s()
            if is_as_fast(now_s, usual_s):
                return now_s
        return self.time_s()

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


def is_as_fast(now_s: float, usual_s: float) -> bool:
    """Whether the machine has the speed that it had, neither less nor more."""
    return abs(now_s / usual_s - 1) <= MOST_DRIFT


def drift(measured_s: Sequence[float], answered_s: Sequence[float]) -> float:
    """By how much the machine took longer when it answered than when it was measured.

    0.1 for a tenth longer, of the medians.
    """
    return float(np.median(answered_s) / np.median(measured_s) - 1)
