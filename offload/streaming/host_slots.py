"""Slots of pinned host memory for extents.

Pinning memory is slow, so a released slot goes to the next extent.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import overload

from edge.offload.streaming.checked_extents import Memory

Unpin = Callable[[], None]


def unpinned(_memory: memoryview) -> Unpin:
    """Pins nothing, for a device that shares the host's memory."""
    return lambda: None


class HostSlots:
    """Makes slots on demand. The `Pages` of a WeightStreamer.

    Used under the streamer's lock, except `close`, which is called after the streamer's.
    """

    def __init__(self, slot_bytes: int, *, pin: Callable[[memoryview], Unpin] = unpinned) -> None:
        """slot_bytes: a multiple of the page size. pin: pins each slot for a device."""
        self._slot_bytes = slot_bytes
        self._pin = pin
        self._slots: list[tuple[memoryview, Unpin]] = []

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def memory(self) -> SlotMemory:
        """Memory for an extent, which gets a slot by `supply`."""
        return SlotMemory()

    def supply(self, memory: Memory) -> None:
        """Give the memory a slot before it is written, unless it has one."""
        assert isinstance(memory, SlotMemory)
        if not len(memory):
            memory.take(self._make())

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        """Give the slot of one memory to another, or free it."""
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
    """Memory of one extent, of one part: its slot, once it has one. See `Memory`."""

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
        """Take a slot. Returns False if it has one already."""
        if self._place is not None:
            return False
        self._place = place
        return True

    def leave(self) -> memoryview | None:
        """Give up its slot, and return it."""
        place, self._place = self._place, None
        return place
