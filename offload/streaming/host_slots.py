"""Slots of host memory that extents share; an extent has one while it is filled.

A slot is expensive to make, because a device copies only from pinned memory. So a released slot is
handed to the next extent.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import overload

from edge.offload.streaming.checked_extents import Memory

Unpin = Callable[[], None]


def unpinned(_memory: memoryview) -> Unpin:
    """For a device that is the host."""
    return lambda: None


class HostSlots:
    """Makes places as they are needed: the Pages of a WeightStreamer.

    Used under the streamer's lock, but for `close`, which comes after it.
    """

    def __init__(self, slot_bytes: int, *, pin: Callable[[memoryview], Unpin] = unpinned) -> None:
        """slot_bytes: a multiple of the page size. `pin` tells a device of each place."""
        self._slot_bytes = slot_bytes
        self._pin = pin
        self._slots: list[tuple[memoryview, Unpin]] = []

    @property
    def num_slots(self) -> int:
        """Places there are now."""
        return len(self._slots)

    def memory(self) -> SlotMemory:
        """One extent's, of one part; it has a place once it was supplied with one."""
        return SlotMemory()

    def supply(self, memory: Memory) -> None:
        """The memory is written next: make it a place, if it has none."""
        assert isinstance(memory, SlotMemory)
        if not len(memory):
            memory.take(self._make())

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        """The place of one extent is the other's now, or given back to the system."""
        assert isinstance(memory, SlotMemory)
        place = memory.leave()
        if place is None:
            return
        if isinstance(to, SlotMemory) and to.take(place):
            return
        index = next(i for i, (each, _) in enumerate(self._slots) if each is place)
        self._slots.pop(index)[1]()

    def close(self) -> None:
        """Free all slots; no read or copy may be under way."""
        while self._slots:
            self._slots.pop()[1]()

    def _make(self) -> memoryview:
        place = memoryview(mmap.mmap(-1, self._slot_bytes)).cast("B")
        self._slots.append((place, self._pin(place)))
        return place


class SlotMemory(Sequence[memoryview]):
    """Memory of one extent: its part is a place that it may not have yet. See `Memory`."""

    def __init__(self) -> None:
        self._place: memoryview | None = None

    def __len__(self) -> int:
        return int(self._place is not None)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        return (() if self._place is None else (self._place,))[index]

    def take(self, place: memoryview) -> bool:
        """False where it has one."""
        if self._place is not None:
            return False
        self._place = place
        return True

    def leave(self) -> memoryview | None:
        """Give its place away, and return it."""
        place, self._place = self._place, None
        return place
