"""How much of something all users of a peer may hold at once, and how much one of them."""

from __future__ import annotations

import asyncio
from collections import Counter

from edge.errors import CapacityError


class Quota:
    """Counts what each owner holds."""

    def __init__(self, what: str, *, of_one: int, of_all: int) -> None:
        """what: in words, for who is refused."""
        self._what = what
        self._of_one = of_one
        self._of_all = of_all
        self._held: Counter[object] = Counter()

    @property
    def held(self) -> int:
        """By all together."""
        return self._held.total()

    def take(self, owner: object, count: int = 1) -> None:
        """Raises CapacityError, and takes nothing, where that is more than may be held."""
        if self._held[owner] + count > self._of_one:
            raise CapacityError(
                f"one device may have {self._of_one} {self._what} at once",
                remedy="close some first",
            )
        if self.held + count > self._of_all:
            raise CapacityError(
                f"this peer has at most {self._of_all} {self._what} at once, of all devices",
                remedy="wait until others close theirs",
            )
        self._held[owner] += count

    def give_back(self, owner: object, count: int = 1) -> None:
        self._held[owner] -= count
        if self._held[owner] <= 0:
            del self._held[owner]


class QuotaShare:
    """What one connection of an owner has of a quota."""

    def __init__(self, quota: Quota, owner: object) -> None:
        self._quota = quota
        self._owner = owner
        self._count = 0

    def take(self, count: int = 1) -> None:
        """Raises CapacityError, and takes nothing, where that is more than may be held."""
        self._quota.take(self._owner, count)
        self._count += count

    def give_back(self, count: int = 1) -> None:
        self._quota.give_back(self._owner, count)
        self._count -= count

    def give_back_all(self) -> None:
        self.give_back(self._count)


class OwnerSemaphore:
    """Bytes that owners hold for moments; who finds too few free waits."""

    def __init__(self, *, of_one: int, of_all: int) -> None:
        self._of_one = of_one
        self._of_all = self._free = of_all
        self._held: Counter[object] = Counter()
        self._freed = asyncio.Event()

    @property
    def held(self) -> int:
        """By all together."""
        return self._of_all - self._free

    async def take(self, owner: object, count: int) -> None:
        """Wait until there are `count`. One owner never waits for what it holds itself alone, if
        that is nothing: so what is larger than its share passes, too."""
        while not self._fits(owner, count):
            self._freed.clear()
            await self._freed.wait()
        self._held[owner] += count
        self._free -= count

    def give_back(self, owner: object, count: int) -> None:
        """Others may have it."""
        self._held[owner] -= count
        self._free += count
        if not self._held[owner]:
            del self._held[owner]
        self._freed.set()

    def _fits(self, owner: object, count: int) -> bool:
        held = self._held[owner]
        return count <= self._free and (not held or held + count <= self._of_one)
