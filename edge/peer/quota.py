"""Quotas and semaphores with a limit for all owners together and one for each owner."""

from __future__ import annotations

import asyncio
from collections import Counter

from edge.errors import CapacityError


class Quota:
    """A quota that refuses at its limits."""

    def __init__(self, what: str, *, of_one: int, of_all: int) -> None:
        """what: the counted thing in words, for error messages."""
        self._what = what
        self._of_one = of_one
        self._of_all = of_all
        self._held: Counter[object] = Counter()

    @property
    def held(self) -> int:
        """Count of all owners together."""
        return self._held.total()

    def take(self, owner: object, count: int = 1) -> None:
        """Raises CapacityError, and takes nothing, above a limit."""
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
    """What one connection holds of a quota."""

    def __init__(self, quota: Quota, owner: object) -> None:
        self._quota = quota
        self._owner = owner
        self._count = 0

    def take(self, count: int = 1) -> None:
        """Raises CapacityError, and takes nothing, above a limit."""
        self._quota.take(self._owner, count)
        self._count += count

    def give_back(self, count: int = 1) -> None:
        self._quota.give_back(self._owner, count)
        self._count -= count

    def give_back_all(self) -> None:
        self.give_back(self._count)


class OwnerSemaphore:
    """A semaphore with a limit for each owner; callers wait at the limits."""

    def __init__(self, *, of_one: int, of_all: int) -> None:
        self._of_one = of_one
        self._of_all = self._free = of_all
        self._held: Counter[object] = Counter()
        self._freed = asyncio.Event()

    @property
    def held(self) -> int:
        """Count of all owners together."""
        return self._of_all - self._free

    async def take(self, owner: object, count: int) -> None:
        """Wait until `count` is free. An owner that holds nothing may exceed its own limit, so that
        a single large request passes."""
        while not self._fits(owner, count):
            self._freed.clear()
            await self._freed.wait()
        self._held[owner] += count
        self._free -= count

    def give_back(self, owner: object, count: int) -> None:
        """Give back `count` and wake the waiters."""
        self._held[owner] -= count
        self._free += count
        if not self._held[owner]:
            del self._held[owner]
        self._freed.set()

    def _fits(self, owner: object, count: int) -> bool:
        held = self._held[owner]
        return count <= self._free and (not held or held + count <= self._of_one)
