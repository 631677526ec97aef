"""Weights of which each step uses some, and which ones is known only just before: experts.

They are in groups, one for each layer. Those that are in memory stay until others need their room;
then the one goes that tokens use most seldom, by what they used so far. Groups take turns in a
cycle, so by recency all would go before they are used again (see `weight_streamer.py`), and how
often a unit is used is what stays alike from token to token (Eliseev, Mazur, Fast Inference of
Mixture-of-Experts Language Models with Offloading, 2023).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence

import numpy as np

from edge.offload.errors import StoreError
from edge.offload.streaming.checked_extents import (
    Begun,
    CheckedExtents,
    Extent,
    Memory,
    Pages,
    Reader,
)

_FORGETTING = 1 / 64
"""What one token's use counts in how often a unit is used. What was before counts that much
less."""

_RUN_READS = 8
"""Units that one run waits for at most: the next ones are read while it computes."""

_MOST = 0.75
"""Who uses this part of a group's units will use as many of the next one's."""


class UnitCache:
    """Units in groups, each with memory of its own, of which so many bytes are in memory at once.

    For one thread at a time, but for `keep` and `close`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Extent]],
        memories: Sequence[Sequence[Memory]],
        reader: Reader,
        *,
        capacity_bytes: int,
        pages: Pages,
    ) -> None:
        """Begins to read as many as there is room for, as many of each group."""
        self._first: list[int] = []
        """Of each group: the number of its first unit."""
        self._counts = [len(group) for group in groups]
        count = 0
        for each in self._counts:
            self._first.append(count)
            count += each
        flat = [memory for group in memories for memory in group]
        self._memories = flat
        self._sizes = [sum(map(len, memory)) for memory in flat]
        self._checked = CheckedExtents([unit for group in groups for unit in group], flat, reader)
        self._pages = pages
        self._capacity_bytes = capacity_bytes
        self._mutex = threading.Lock()
        self._begun: dict[int, Begun] = {}
        """Units that are in memory or on their way there."""
        self._held_bytes = 0
        self._is_held = np.zeros(count, np.bool_)
        self._shares = np.zeros(count, np.float64)
        """Of tokens, that used the unit."""
        self._pinned: set[int] = set()
        self._failure: StoreError | None = None
        self._is_closed = False
        self.uses = 0
        """Units that steps used."""
        self.reads = 0
        """Of these, units that were not in memory."""
        with self._mutex:
            self._fill()

    @property
    def wait_s(self) -> float:
        """Seconds that users waited for the disk."""
        return self._checked.wait_s

    @property
    def held_bytes(self) -> int:
        """In memory, or on the way there."""
        return self._held_bytes

    def runs(
        self, group: int, rows: Sequence[int], *, tokens: int
    ) -> Generator[Sequence[int], None, None]:
        """Those of a group's units that have rows, ascending, in runs of one or more.

        A run's units are in memory until the next one is asked for, or the iterator is closed.
        `rows`: of each unit, how many of the `tokens` use it. Raises StoreError when the disk fails
        or the file is not what was written.
        """
        first = self._first[group]
        wanted = [first + place for place, count in enumerate(rows) if count]
        self._count(group, rows, tokens)
        missed = [unit for unit in wanted if not self._is_held[unit]]
        self.uses += len(wanted)
        self.reads += len(missed)
        is_most = len(wanted) >= _MOST * self._counts[group]
        try:
            while wanted:
                with self._mutex:
                    run, begun = self._bring(wanted)
                for unit in run:
                    self._wait(unit, begun[unit])
                del wanted[: len(run)]
                if is_most and not wanted:
                    with self._mutex:
                        self._bring_ahead((group + 1) % len(self._first))
                yield [unit - first for unit in run]
                with self._mutex:
                    self._pinned.clear()
        finally:
            with self._mutex:
                self._pinned.clear()
                if not self._is_closed:
                    self._make_room(0)

    def keep(self, capacity_bytes: int) -> None:
        """From now on so many bytes may be in memory; any more are let go before this returns.

        But for units in use, which are let go after their use. From any thread.
        """
        with self._mutex:
            self._capacity_bytes = capacity_bytes
            if not self._is_closed:
                self._make_room(0)

    def close(self) -> None:
        """Read no more; whoever wants a unit gets a StoreError. The reader is not closed."""
        with self._mutex:
            self._is_closed = True
        self._failure = None  # its traceback would keep whoever waited, and the weights, alive

    def _count(self, group: int, rows: Sequence[int], tokens: int) -> None:
        first = self._first[group]
        own = self._shares[first : first + self._counts[group]]
        kept = (1 - _FORGETTING) ** tokens
        own *= kept
        own += (1 - kept) / tokens * np.asarray(rows)

    def _bring(self, wanted: Sequence[int]) -> tuple[list[int], dict[int, Begun]]:
        """The first of the wanted ones that find room together, and few that are not there yet.

        As many as there is room for are begun, to be there for the next run.
        """
        self._check()
        run: list[int] = []
        begun: dict[int, Begun] = {}
        room, missing = self._capacity_bytes, 0
        is_run = True
        for unit in wanted:
            room -= self._sizes[unit]
            missing += unit not in self._begun
            if begun and room < 0:
                break
            is_run = is_run and (not run or missing <= _RUN_READS)
            if is_run:
                run.append(unit)
            self._pinned.add(unit)
            begun[unit] = self._begun[unit] if unit in self._begun else self._begin(unit)
        return run, begun

    def _bring_ahead(self, group: int) -> None:
        """The next units while these are used, as far as they take half of the room at most."""
        first = self._first[group]
        room = self._capacity_bytes // 2
        own = range(first, first + self._counts[group])
        kept = {unit for unit in own if self._is_held[unit]}
        for unit in own:
            room -= self._sizes[unit]
            if room < 0 or self._is_closed or self._failure is not None:
                return
            if unit not in self._begun and not self._begin_ahead(unit, kept):
                return
            kept.add(unit)

    def _begin_ahead(self, unit: int, kept: set[int]) -> bool:
        """False where that would take the room of what is used before, or of those `kept`."""
        others = self._pinned
        self._pinned = others | kept
        try:
            if self._held_bytes + self._sizes[unit] > self._capacity_bytes and not self._victims():
                return False
            self._begin(unit)
            return True
        finally:
            self._pinned = others

    def _begin(self, unit: int) -> Begun:
        self._make_room(self._sizes[unit], unit)
        self._pages.supply(self._memories[unit])
        begun = self._begun[unit] = self._checked.begin(unit)
        self._is_held[unit] = True
        self._held_bytes += self._sizes[unit]
        return begun

    def _make_room(self, nbytes: int, unit: int | None = None) -> None:
        """Let go of what is used most seldom; the pages of the last one go to `unit`."""
        while self._held_bytes + nbytes > self._capacity_bytes:
            victims = self._victims()
            if not victims:
                return
            victim = min(victims, key=lambda each: self._shares[each])
            is_last = self._held_bytes + nbytes - self._sizes[victim] <= self._capacity_bytes
            self._let_go(victim, self._memories[unit] if unit is not None and is_last else None)

    def _victims(self) -> list[int]:
        return [unit for unit in self._begun if unit not in self._pinned]

    def _let_go(self, unit: int, to: Memory | None) -> None:
        with contextlib.suppress(StoreError):  # told when it is read again
            self._begun.pop(unit).wait()
        self._is_held[unit] = False
        self._held_bytes -= self._sizes[unit]
        self._pages.hand_on(self._memories[unit], to)

    def _fill(self) -> None:
        """The first units of every group, then the second ones, and so on, while there is room."""
        for place in range(max(self._counts, default=0)):
            for first, count in zip(self._first, self._counts, strict=True):
                unit = first + place
                if place < count and self._held_bytes + self._sizes[unit] <= self._capacity_bytes:
                    self._begin(unit)

    def _wait(self, unit: int, begun: Begun) -> None:
        try:
            self._checked.wait(begun)
            with self._mutex:
                self._check()
                again = self._checked.again(unit)
            if again is not None:
                self._checked.wait(again)
        except StoreError as error:
            self._failure = error
            raise
        if self._is_closed:
            raise StoreError(_CLOSED)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise StoreError(_CLOSED)


_CLOSED = "the weights are no longer read; the model was closed"
