"""A cache of experts, of which each step uses some that are known only just before their use.

Experts are units in groups, one for each layer. If there is no room, the unit with the fewest uses
per token is evicted. Groups take turns in a cycle, so eviction by recency would miss every time
(see `weight_streamer.py`), while a unit's frequency of use is stable over tokens (Eliseev, Mazur,
Fast Inference of Mixture-of-Experts Language Models with Offloading, 2023).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from edge.offload.errors import StoreError
from edge.offload.streaming.checked_extents import (
    BegunReads,
    CheckedExtents,
    Extent,
    ExtentReader,
    Memory,
    Pages,
)

_FORGETTING = 1 / 64
"""Weight of one token in the moving average of a unit's uses."""

_RUN_READS = 8
"""Most units that one run waits for; the next ones are read while it computes."""

_MOST = 0.75
"""A step that uses this share of a group is expected to use as much of the next one."""


class UnitPlace(Protocol):
    """Memory for a unit of a kind, and the graph that uses the unit in it."""

    @property
    def memory(self) -> Memory: ...


P = TypeVar("P", bound=UnitPlace)


class ExpertCache(Generic[P]):
    """A cache of at most `capacity_bytes` of units, each in a place of its kind.

    Places are opened on demand and reused, because opening one takes much longer than reading a
    unit. For one thread at a time, except `keep` and `close`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Extent]],
        kinds: Sequence[int],
        open_place: Callable[[int], P],
        reader: ExtentReader,
        *,
        capacity_bytes: int,
        place_bytes: int,
        pages: Pages,
    ) -> None:
        """Begin to read as many units of each group as fit.

        kinds: the kind of each group's units, which have one size. open_place: opens a place of a
        kind. place_bytes: overhead of a place, which is all that an empty one takes.
        """
        self._first: list[int] = []
        """Number of each group's first unit."""
        self._counts = [len(group) for group in groups]
        self._kinds: list[int] = []
        """Kind of each unit."""
        for group, kind in zip(groups, kinds, strict=True):
            self._first.append(len(self._kinds))
            self._kinds += [kind] * len(group)
        self._mutex = threading.Lock()
        units = [unit for group in groups for unit in group]
        self._checked = CheckedExtents(units, reader, self._mutex)
        self._open_place = open_place
        self._place_bytes = place_bytes
        self._pages = pages
        self._capacity_bytes = capacity_bytes
        self._idle = {kind: [open_place(kind)] for kind in sorted({*self._kinds})}
        """Places of each kind without a unit."""
        self._sizes = {kind: sum(map(len, place.memory)) for kind, (place,) in self._idle.items()}
        """Bytes of a unit of each kind."""
        self._begun: dict[int, BegunReads] = {}
        """Units that are in memory or being read."""
        self._places: dict[int, P] = {}
        """Places of these units."""
        self._held_bytes = place_bytes * len(self._idle)
        self._is_held = np.zeros(len(self._kinds), np.bool_)
        self._shares = np.zeros(len(self._kinds), np.float64)
        """Share of tokens that used each unit."""
        self._pinned: set[int] = set()
        self.uses = 0
        """Units that steps used."""
        self.reads = 0
        """Used units that were not in memory."""
        with self._mutex:
            self._fill()

    @property
    def wait_s(self) -> float:
        """Seconds that users waited for the disk."""
        return self._checked.wait_s

    @property
    def held_bytes(self) -> int:
        """Bytes of units in memory or being read, and of places."""
        return self._held_bytes

    def runs(
        self, group: int, rows: Sequence[int], *, tokens: int
    ) -> Generator[Sequence[tuple[int, P]], None, None]:
        """The units of a group that have rows, ascending, in runs, each with its place.

        A run's units stay until the next run is requested or the iterator is closed. rows: number
        of the `tokens` that use each unit. Raises StoreError if the disk fails or the file has
        changed.
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
                    self._checked.wait(unit, begun[unit], self._places[unit].memory)
                del wanted[: len(run)]
                if is_most and not wanted:
                    with self._mutex:
                        self._bring_ahead((group + 1) % len(self._first))
                yield [(unit - first, self._places[unit]) for unit in run]
                with self._mutex:
                    self._pinned.clear()
        finally:
            with self._mutex:
                self._pinned.clear()
                if not self._checked.is_closed:
                    self._make_room(for_good=False)

    def keep(self, capacity_bytes: int, *, for_good: bool = True) -> None:
        """Set the capacity; units beyond it are evicted before this returns.

        Units in use are evicted after their use. Called from any thread. for_good: also close the
        places of evicted units.
        """
        with self._mutex:
            self._capacity_bytes = capacity_bytes
            if not self._checked.is_closed:
                self._make_room(for_good=for_good)

    def close(self) -> None:
        """Stop reading. Waits for units end with a StoreError. Does not close the reader."""
        self._checked.close()

    def _count(self, group: int, rows: Sequence[int], tokens: int) -> None:
        first = self._first[group]
        own = self._shares[first : first + self._counts[group]]
        kept = (1 - _FORGETTING) ** tokens
        own *= kept
        own += (1 - kept) / tokens * np.asarray(rows)

    def _bring(self, wanted: Sequence[int]) -> tuple[list[int], dict[int, BegunReads]]:
        """The first wanted units that fit together, with few unread ones among them.

        Begins to read further units that fit, for the next run.
        """
        self._checked.check()
        run: list[int] = []
        begun: dict[int, BegunReads] = {}
        room, missing = self._capacity_bytes, 0
        is_run = True
        for unit in wanted:
            room -= self._whole(unit)
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
        """Begin to read the next group, in at most half of the room."""
        first = self._first[group]
        room = self._capacity_bytes // 2
        own = range(first, first + self._counts[group])
        kept = {unit for unit in own if self._is_held[unit]}
        for unit in own:
            room -= self._whole(unit)
            if room < 0 or self._checked.is_over:
                return
            if unit not in self._begun and not self._begin_ahead(unit, kept):
                return
            kept.add(unit)

    def _begin_ahead(self, unit: int, kept: set[int]) -> bool:
        """Begin to read a unit. Returns False if that would evict pinned units or those `kept`."""
        others = self._pinned
        self._pinned = others | kept
        try:
            if self._lacks(unit) > 0 and not self._victims():
                return False
            self._begin(unit)
            return True
        finally:
            self._pinned = others

    def _begin(self, unit: int) -> BegunReads:
        place = self._place_for(unit)
        self._pages.supply(place.memory)
        begun = self._begun[unit] = self._checked.begin(unit, place.memory)
        self._places[unit] = place
        self._is_held[unit] = True
        self._held_bytes += self._sizes[self._kinds[unit]]
        return begun

    def _whole(self, unit: int) -> int:
        """Bytes of a unit and its place."""
        return self._sizes[self._kinds[unit]] + self._place_bytes

    def _lacks(self, unit: int) -> int:
        """Bytes that one more unit is over the capacity; negative is free room."""
        kind = self._kinds[unit]
        nbytes = self._sizes[kind] + (0 if self._idle[kind] else self._place_bytes)
        return self._held_bytes + nbytes - self._capacity_bytes

    def _place_for(self, unit: int) -> P:
        """An empty place. Evicts the least used unit if need be, one of the same kind if possible,
        whose place and pages are reused."""
        kind = self._kinds[unit]
        while self._lacks(unit) > 0:
            victims = self._victims()
            own = [each for each in victims if self._kinds[each] == kind]
            if own and self._held_bytes <= self._capacity_bytes:
                return self._let_go(self._least_used(own))
            if self._close_idle(but_one_of=kind):
                continue
            if not victims:
                break
            self._empty(self._let_go(self._least_used(own or victims)), kind=None)
        if self._idle[kind]:
            return self._idle[kind].pop()
        place = self._open_place(kind)
        self._held_bytes += self._place_bytes
        return place

    def _make_room(self, *, for_good: bool) -> None:
        """Evict the least used units until the rest fits."""
        while self._held_bytes > self._capacity_bytes:
            if for_good and self._close_idle():
                continue
            victims = self._victims()
            if victims:
                victim = self._least_used(victims)
                self._empty(self._let_go(victim), kind=None if for_good else self._kinds[victim])
            elif not self._close_idle():
                return

    def _victims(self) -> list[int]:
        return [unit for unit in self._begun if unit not in self._pinned]

    def _least_used(self, units: Sequence[int]) -> int:
        return min(units, key=lambda each: float(self._shares[each]))

    def _let_go(self, unit: int) -> P:
        """Evict a unit. Returns its place, with its pages."""
        with contextlib.suppress(StoreError):  # raised when it is read again
            self._begun.pop(unit).wait()
        self._is_held[unit] = False
        self._held_bytes -= self._sizes[self._kinds[unit]]
        return self._places.pop(unit)

    def _empty(self, place: P, *, kind: int | None) -> None:
        """Free a place's pages, and close it (kind: None) or keep it as idle."""
        self._pages.hand_on(place.memory, None)
        if kind is None:
            self._held_bytes -= self._place_bytes
        else:
            self._idle[kind].append(place)

    def _close_idle(self, *, but_one_of: int | None = None) -> bool:
        """Close an idle place, but keep one of kind `but_one_of`. Returns whether there was one."""
        for kind, places in self._idle.items():
            if len(places) > (kind == but_one_of):
                places.pop()
                self._held_bytes -= self._place_bytes
                return True
        return False

    def _fill(self) -> None:
        """Read the first unit of every group, then the second ones, and so on, while they fit."""
        for place in range(max(self._counts, default=0)):
            for first, count in zip(self._first, self._counts, strict=True):
                unit = first + place
                if place < count and self._lacks(unit) <= 0:
                    self._begin(unit)
