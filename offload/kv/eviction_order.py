"""Eviction order by cost and last use: GreedyDual-Size.

Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997. A used key is worth its cost per
byte, plus the worth of the last evicted key. So costly keys stay longer, but not for ever. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator


class EvictionOrder:
    """Eviction order of keys. Among keys of equal worth the least recently used goes first."""

    def __init__(self) -> None:
        self._worths: dict[str, float] = {}
        """Worths by key, the least recently used first."""
        self._gone = 0.0
        """Worth of the last evicted key."""

    def use(self, key: str, cost_per_byte: float = 0.0) -> None:
        """Add or use a key now. Its worth never falls."""
        worth = max(self._worths.pop(key, 0.0), self._gone + cost_per_byte)
        self._worths[key] = worth

    def forget(self, key: str) -> None:
        """Remove a key that was not evicted."""
        del self._worths[key]

    def evict(self, key: str) -> None:
        """Remove a key that was evicted."""
        self._gone = max(self._gone, self._worths.pop(key))

    def __iter__(self) -> Iterator[str]:
        """Keys in the order of eviction."""
        return iter(sorted(self._worths, key=self._worths.__getitem__))

    def first(self) -> str:
        """The next key to evict. Raises ValueError if there is none."""
        return min(self._worths, key=self._worths.__getitem__)
