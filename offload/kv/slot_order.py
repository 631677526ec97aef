"""The slots of requests in a KV pool, and their moves. Pure.

Pools use it to move caches. Scheduling uses it to order batches by slot, which moves no cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Gathered(NamedTuple):
    """The moves that bring requests into neighbouring slots."""

    first: int
    """The slot of the first request."""
    swaps: tuple[tuple[int, int], ...]
    """Pairs of slots to swap, in order."""


class SlotOrder:
    """The order of requests in slots, without holes."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def slot(self, name: str) -> int:
        """The slot of a request. Raises ValueError if it has none."""
        return self._names.index(name)

    def open(self, name: str) -> int:
        """The slot of a request, a new one at the end if it has none."""
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def rename(self, name: str, to: str) -> None:
        self._names[self._names.index(name)] = to

    def release(self, name: str) -> None:
        """Free a request's slot; the last request moves into it. Ignores unknown names."""
        if name in self._names:
            slot = self._names.index(name)
            last = self._names.pop()
            if slot < len(self._names):
                self._names[slot] = last

    def gather(self, names: Sequence[str], *, at_end: bool = False) -> Gathered:
        """Move these requests, which have slots, into neighbouring slots in this order.

        An unchanged order moves nothing. The run of slots with the fewest moves is chosen, the last
        of several. at_end: choose the last slots.
        """
        slots = [self._names.index(name) for name in names]
        ends = len(self._names) - len(slots)
        if slots == list(range(slots[0], slots[0] + len(slots))) and slots[0] in (
            [ends] if at_end else range(ends + 1)
        ):
            return Gathered(slots[0], ())
        first = ends
        if not at_end:
            stay = Counter(slot - place for place, slot in enumerate(slots))
            first = max(range(ends + 1), key=lambda start: (stay[start], start))
        swaps = []
        for target, name in enumerate(names, first):
            slot = self._names.index(name)
            if slot != target:
                self._names[slot], self._names[target] = self._names[target], name
                swaps.append((target, slot))
        return Gathered(first, tuple(swaps))

    def arranged(self, names: Sequence[str]) -> list[str]:
        """These requests in the order for which `gather` moves the fewest. Those without a slot
        come last in the given order, in which they will get their slots."""
        wanted = {name for name in names if name in self._names}
        new = [name for name in names if name not in wanted]
        order = [*self._names, *new]
        wanted.update(new)
        is_wanted = [name in wanted for name in order]
        count = len(names)
        inside = sum(is_wanted[:count])
        best, first = inside, 0
        for start in range(1, len(order) - count + 1):
            inside += is_wanted[start + count - 1] - is_wanted[start - 1]
            if inside >= best:
                best, first = inside, start
        window = range(first, first + count)
        others = (name for at, name in enumerate(order) if at not in window and is_wanted[at])
        return [order[at] if is_wanted[at] else next(others) for at in window]
