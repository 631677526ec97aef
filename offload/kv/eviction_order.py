"""Which of several things goes first: what is worth least, by its cost and by when it was of use.

GreedyDual-Size (Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997). What is used is
worth its cost for each byte, above what the last one was worth that had to go. So what costs more
stays longer, and does not stay for ever. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator


class EvictionOrder:
    """The order in which things go, by their keys. Of those that are worth the same, the least
    recently used goes first; where costs are all alike, that decides alone."""

    def __init__(self) -> None:
        self._worths: dict[str, float] = {}
        """The least recently used first."""
        self._gone = 0.0
        """What the last one was worth that went."""

    def use(self, key: str, cost_per_byte: float = 0.0) -> None:
        """It is there, and of use now. What it is worth already it stays worth."""
        worth = max(self._worths.pop(key, 0.0), self._gone + cost_per_byte)
        self._worths[key] = worth

    def forget(self, key: str) -> None:
        """It is not there any more, and did not have to make room."""
        del self._worths[key]

    def evict(self, key: str) -> None:
        """It made room."""
        self._gone = max(self._gone, self._worths.pop(key))

    def __iter__(self) -> Iterator[str]:
        """Those that go first come first."""
        return iter(sorted(self._worths, key=self._worths.__getitem__))

    def first(self) -> str:
        """Raises ValueError where there is none."""
        return min(self._worths, key=self._worths.__getitem__)
