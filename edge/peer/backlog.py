"""What a session was told to do and its compute thread has not begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

MOST_BACKLOG_BYTES = 1 << 20
"""Bytes of one session: prompts of 200,000 tokens, or 500 steps of one token."""


class Backlog:
    """Bytes of posts that wait for a compute thread: who sends more is not read meanwhile."""

    def __init__(self, most_bytes: int = MOST_BACKLOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._told_bytes = 0
        self._begun_bytes = 0
        """Each of the two is written by one thread, the loop's and the compute thread."""
        self._is_awaited = False
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._told_bytes - self._begun_bytes

    async def take(self, num_bytes: int) -> Callable[[], None]:
        """Wait until there is room. What is returned gives it back, and is for the compute thread.

        One post always has room if no other waits: how large one may be, its frame's limits say.
        """
        while not self._fits(num_bytes):
            self._changed.clear()
            self._is_awaited = True
            if not self._fits(num_bytes):  # looked at again: others see only from here on
                await self._changed.wait()
        self._is_awaited = False
        self._told_bytes += num_bytes
        return partial(self._begin, num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + num_bytes <= self._most_bytes

    def _begin(self, num_bytes: int) -> None:
        self._begun_bytes += num_bytes
        if self._is_awaited:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)
