"""Caches of finished requests that stay in free memory, and their eviction. Pure.

The cache that is cheapest to compute again for its memory is evicted first, and a cache that was
not used for long becomes cheap (GreedyDual-Size: Cao and Irani, 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

Cost = Callable[[str, Collection[str]], float]
"""Cost of computing a request's cache again while the other named caches stay."""


@dataclass(slots=True)
class _KeptCache:
    held: int
    worth_from: float
    """Worth of the last evicted cache when this one was last used."""


class KeptCaches:
    """Kept caches by request, and the tokens of memory that each holds."""

    def __init__(self, most: int, room: Callable[[], int]) -> None:
        """most: caches that are kept at once. room: tokens of memory that they may hold now."""
        self.most, self._room = most, room
        self._caches: dict[str, _KeptCache] = {}
        """The longest unused first."""
        self._worth = 0.0
        """Worth of the last evicted cache."""

    def __contains__(self, request: object) -> bool:
        return request in self._caches

    def __iter__(self) -> Iterator[str]:
        return iter(self._caches)

    def add(self, request: str, held: int) -> None:
        self._caches[request] = _KeptCache(held, self._worth)

    def used(self, request: str) -> None:
        """The cache was useful, so others are evicted before it."""
        cache = self._caches[request] = self._caches.pop(request)
        cache.worth_from = self._worth

    def drop(self, request: str) -> None:
        """The cache now belongs to another request, or to none."""
        del self._caches[request]

    def fits(self, request: str) -> bool:
        """Whether the cache has room once all others are evicted."""
        return self._caches[request].held <= self._room()

    def evict(
        self, cost: Cost = lambda _request, _others: 1.0, spared: Collection[str | None] = ()
    ) -> tuple[str, ...]:
        """Evict the caches that are worth least, except `spared`, until the others have room."""
        gone = []
        while len(self._caches) > self.most or self._held > self._room():
            worth = {
                request: cache.worth_from + cost(request, self._caches) / max(1, cache.held)
                for request, cache in self._caches.items()
                if request not in spared
            }
            if not worth:
                break
            least = min(worth, key=worth.__getitem__)
            self._worth = max(self._worth, worth[least])
            gone.append(least)
            del self._caches[least]
        return tuple(gone)

    @property
    def _held(self) -> int:
        return sum(each.held for each in self._caches.values())
