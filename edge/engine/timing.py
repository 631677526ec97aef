"""Where a shard's time goes: computing, summing with its stage, waiting for others, sampling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edge.protocol.step_times import ExpectedStep, StepTimes
from edge.transport import BackgroundWork, Collective

_JUDGED_STEPS = 32
"""Seconds at most where somebody waits for them, and enough to pass over a hiccup."""


class StepPace:
    """How the steps of one token of one request go, against what was predicted of them.

    Noted by the thread that computes, asked by another.
    """

    def __init__(self, expected: ExpectedStep | None) -> None:
        """expected: None where nothing was predicted."""
        self._expected = expected
        self._ratios: list[float] = []
        self._found: tuple[float, float] | None = None
        """The last median, and when it was taken."""

    def note(self, compute_s: float, *, position: int, now_s: float) -> None:
        """A step has taken `compute_s`, with `position` tokens cached."""
        if self._expected is None:
            return
        self._ratios.append(compute_s / self._expected.at(position))
        if len(self._ratios) == _JUDGED_STEPS:
            self._found = statistics.median(self._ratios), now_s
            self._ratios.clear()

    def slower(self, *, now_s: float, within_s: float) -> float | None:
        """Times the prediction; None where none was judged within so long."""
        if self._found is None or now_s - self._found[1] > within_s:
            return None
        return self._found[0]


class ShardCounters:
    """The counters of one shard, since they were last taken: of prompts and of decoding."""

    def __init__(self, expected: ExpectedStep | None = None) -> None:
        self.prompt, self.decode = StepTimes(), StepTimes()
        self.pace = StepPace(expected)
        self.now = self.prompt
        """Those that the step under way counts in."""

    def begin(self, *, is_decode: bool) -> None:
        """The next step is a token of each request in it, or else a chunk of a prompt."""
        self.now = self.decode if is_decode else self.prompt

    def take(self) -> tuple[StepTimes, StepTimes]:
        """Those of prompts and those of decoding; they start again from zero."""
        return self.prompt.take(), self.decode.take()


class TimedCollective:
    """A Collective that adds the time of its sums to `times.now.reduce_s`. See `Collective`.

    Of sums on a device only the time to begin them: it computes them among everything else.
    """

    def __init__(self, inner: Collective, times: ShardCounters) -> None:
        self._inner = inner
        self._times = times
        self.rank = inner.rank
        self.size = inner.size
        self.memory = inner.memory

    def all_reduce(self, array: NDArray[Any]) -> None:
        start = time.perf_counter()
        self._inner.all_reduce(array)
        self._times.now.reduce_s += time.perf_counter() - start

    def begin_all_reduce(self, array: NDArray[Any]) -> BackgroundWork:
        """Only the wait for it counts: what the shard computes meanwhile is not lost."""
        return _TimedWork(self._inner.begin_all_reduce(array), self._times)

    def settle(self) -> None:
        """No time of sums: what the shard computed before is waited for as well."""
        self._inner.settle()

    def all_gather(self, own: NDArray[Any], into: Sequence[NDArray[Any]]) -> None:
        self._inner.all_gather(own, into)

    def gather(self, own: NDArray[Any], into: Sequence[NDArray[Any]] | None, *, root: int) -> None:
        self._inner.gather(own, into, root=root)

    def broadcast(self, array: NDArray[Any], *, root: int) -> None:
        self._inner.broadcast(array, root=root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class _TimedWork:
    """Work whose wait counts as time of sums. See `BackgroundWork`."""

    def __init__(self, inner: BackgroundWork, times: ShardCounters) -> None:
        self._inner = inner
        self._times = times

    def wait(self) -> None:
        start = time.perf_counter()
        self._inner.wait()
        self._times.now.reduce_s += time.perf_counter() - start
