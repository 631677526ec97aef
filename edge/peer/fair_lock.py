"""Who is next where few may work at once: owners take turns, however often each asks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """`at_once` owners work at the same time, each at one thing: one that asks a hundred times
    keeps the others waiting for one of these, not for all."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._working: set[object] = set()
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        """By owner; whose turn comes first stands first."""

    def locked(self) -> bool:
        """Whether anybody works."""
        return bool(self._working)

    @asynccontextmanager
    async def turn(self, owner: object) -> AsyncIterator[None]:
        """Wait until it is this owner's turn, and pass it on at the end."""
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
                self._end(owner)  # it was given the turn, and has no use for it any more
            raise

    def _end(self, owner: object) -> None:
        self._working.remove(owner)
        if owner in self._waiting:  # what else it asks for is behind what others do
            self._waiting[owner] = self._waiting.pop(owner)
        self._pass_on()

    def _pass_on(self) -> None:
        for owner in list(self._waiting):
            if len(self._working) >= self._at_once:
                return
            if owner not in self._working and self._begin(owner):
                self._working.add(owner)

    def _begin(self, owner: object) -> bool:
        """Whether anybody of this owner's still waited."""
        waiting, begins = self._waiting[owner], False
        while waiting and not begins:
            first = waiting.popleft()
            if begins := not first.done():
                first.set_result(None)
        if not waiting:
            del self._waiting[owner]
        return begins
