"""Time counters of a shard: computing, sums, waits for other stages, sampling."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edge.protocol.step import Step
from edge.protocol.step_times import ExpectedStep, StepTimes, TokenSteps
from edge.transport import BackgroundWork, Collective

_JUDGED_STEPS = 32
"""Steps of one judgement: they take seconds, and their median ignores a hiccup."""


class StepPace:
    """Pace of decode steps of a single request, relative to the prediction.

    The compute thread writes it; another thread reads it.
    """

    def __init__(self, expected: ExpectedStep | None) -> None:
        """expected: None if nothing was predicted."""
        self._expected = expected
        self._ratios: list[float] = []
        self._found: tuple[float, float] | None = None
        """The last median and its time."""

    def note(self, compute_s: float, *, position: int, now_s: float) -> None:
        """Record that a step took `compute_s`, with `position` tokens cached."""
        if self._expected is None:
            return
        self._ratios.append(compute_s / self._expected.at(position))
        if len(self._ratios) == _JUDGED_STEPS:
            self._found = statistics.median(self._ratios), now_s
            self._ratios.clear()

    def slower(self, *, now_s: float, within_s: float) -> float | None:
        """Time relative to the prediction. None if nothing was judged within `within_s`."""
        if self._found is None or now_s - self._found[1] > within_s:
            return None
        return self._found[0]


class ShardCounters:
    """Counters of one shard since they were last taken, for prefill and for decode."""

    def __init__(self, expected: ExpectedStep | None = None) -> None:
        self.prompt, self.decode = StepTimes(), StepTimes()
        self.pace = StepPace(expected)
        self.now = self.prompt
        """The counters of the current step."""
        self._tokens = TokenSteps()
        self._is_first = True

    def begin(self, *, is_decode: bool) -> None:
        """Choose the counters of the next step."""
        self.now = self.decode if is_decode else self.prompt

    def computed(self, step: Step, compute_s: float, *, now_s: float) -> None:
        """Record that the shard's own part of a step took `compute_s`."""
        self.now.compute_s += compute_s
        if step.num_tokens > 1 or step.is_mixed:
            return
        if step.batch == 1:
            self.pace.note(compute_s, position=step.entries[0].position, now_s=now_s)
        if self._is_first:
            self._is_first = False
            return
        self._tokens.steps += 1
        self._tokens.rows += step.batch
        self._tokens.tokens += sum(entry.position for entry in step.entries)
        self._tokens.compute_s += compute_s

    def count(self) -> TokenSteps:
        """The decode steps since the load."""
        return dataclasses.replace(self._tokens)

    def take(self) -> tuple[StepTimes, StepTimes]:
        """The prefill and decode counters, which restart at zero."""
        return self.prompt.take(), self.decode.take()


class TimedCollective:
    """A Collective that adds the time of its sums to `times.now.reduce_s`. See `Collective`.

    For sums on a device it counts only the time to start them.
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
        """Counts only the wait: computing meanwhile is not lost time."""
        return _TimedWork(self._inner.begin_all_reduce(array), self._times)

    def settle(self) -> None:
        """Not counted: it waits for earlier computing as well."""
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
