"""How fast the machine itself is at the moment, by work that is none of Edge's.

A machine that is shared with others, or emulated itself, changes its speed by tens of percent from
one second to the next. Emulated devices must not, or a prediction is off by that whatever the
planner does: so they count their time in beats of work that is always the same.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MEMORY_BYTES = 64 << 20
"""More than a cache holds. Most of a beat is reading it, at all the speed it has: so does decoding,
and what disturbs a machine disturbs that most."""

BLOCK_BYTES = 256 << 10
"""Is copied to where a cache holds it."""

BLOCKS = 12
"""In a beat."""

PRODUCT_ROWS = 40
"""The rest is computing; not by the linear algebra library, which has threads of its own."""

LAST_BEATS = 24
"""By which the speed of the moment is known."""

MOST_BEATS = 12
"""Of one go."""

TIMED_BEATS = 1200
"""Of each core when the machine is timed."""


class Metronome:
    """Beats: pieces of work that are always the same, of a tenth of a millisecond or so."""

    def __init__(self) -> None:
        self._blocks = np.ones((MEMORY_BYTES // BLOCK_BYTES, BLOCK_BYTES // 8))
        self._copy = np.ones(BLOCK_BYTES // 8)
        self._square = np.ones((PRODUCT_ROWS, PRODUCT_ROWS))
        self._next = 0
        self._last: deque[float] = deque(maxlen=LAST_BEATS)
        self._owed_s = 0.0
        for _ in range(LAST_BEATS):
            self.beat()

    def beat(self) -> None:
        """Do one piece and note the processor time it took."""
        start_s = time.thread_time()
        for index in range(self._next, self._next + BLOCKS):
            np.copyto(self._copy, self._blocks[index % len(self._blocks)])
        np.einsum("ij,jk->ik", self._square, self._square)
        self._last.append(time.thread_time() - start_s)
        self._next = (self._next + BLOCKS) % len(self._blocks)

    @property
    def beat_s(self) -> float:
        """Seconds that one takes at the moment: the median of the last."""
        return statistics.median(self._last)

    def keep_up(self, processor_s: float, share: float) -> None:
        """Beat for `share` of the processor time that something else has just taken."""
        self._owed_s += processor_s * share
        for _ in range(min(MOST_BEATS, int(self._owed_s / self.beat_s))):
            self.beat()
            self._owed_s = max(0.0, self._owed_s - self._last[-1])


class Machine:
    """Times the same work on the given cores at once, again and again."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._metronomes = {core: Metronome() for core in cores}

    def time_s(self) -> float:
        """Seconds that a beat takes now, on the slowest of the cores."""
        with ThreadPoolExecutor(len(self._metronomes)) as threads:
            return max(threads.map(_timed, self._metronomes.items()))


def _timed(each: tuple[int, Metronome]) -> float:
    core, metronome = each
    os.sched_setaffinity(0, {core})  # of this thread alone
    found: list[float] = []
    for _ in range(TIMED_BEATS):
        metronome.beat()
        found.append(metronome.beat_s)
    return statistics.median(found)


def drift(measured_s: Sequence[float], answered_s: Sequence[float]) -> float:
    """By how much the machine took longer when it answered than when it was measured.

    0.1 for a tenth longer, of the medians.
    """
    return statistics.median(answered_s) / statistics.median(measured_s) - 1
