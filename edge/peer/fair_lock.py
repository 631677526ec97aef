"""A fair lock: owners take turns (round robin), however often each asks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """A lock for `at_once` owners. Each owner holds it once at a time, so an owner with a hundred
    waiters delays another by one turn, not by all."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._working: set[object] = set()
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        """Waiters by owner, in the order of their next turns."""

    def locked(self) -> bool:
        """Whether any owner holds it."""
        return bool(self._working)

    @asynccontextmanager
    async def turn(self, owner: object) -> AsyncIterator[None]:
        """Hold the lock for `owner`."""
        await self._take(owner)
        try:
            yield
        finally:
            self._end(owner)

    async def _take(self, owner: object) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        self._pass_on()
        try:
            await mine
        except BaseException:
            if not mine.cancelled():
                self._end(owner)  # it got the lock and was cancelled
            raise

    def _end(self, owner: object) -> None:
        self._working.remove(owner)
        if owner in self._waiting:  # its other waiters go behind those of other owners
            self._waiting[owner] = self._waiting.pop(owner)
        self._pass_on()

    def _pass_on(self) -> None:
        for owner in list(self._waiting):
            if len(self._working) >= self._at_once:
                return
            if owner not in self._working and self._begin(owner):
                self._working.add(owner)

    def _begin(self, owner: object) -> bool:
        """Wake the owner's first waiter. False if all were cancelled."""
        waiting, begins = self._waiting[owner], False
        while waiting and not begins:
            first = waiting.popleft()
            if begins := not first.done():
                first.set_result(None)
        if not waiting:
            del self._waiting[owner]
        return begins
