"""The backlog of a session: posts that its compute thread has not begun, bounded in bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

MOST_BACKLOG_BYTES = 1 << 20
"""Limit for one session: prompts of 200,000 tokens, or 500 steps of one token."""


class Backlog:
    """Counts the bytes of waiting posts; at the limit the connection is not read (backpressure)."""

    def __init__(self, most_bytes: int = MOST_BACKLOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._told_bytes = 0
        self._begun_bytes = 0
        """Each counter has one writer: the loop, and the compute thread."""
        self._is_awaited = False
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._told_bytes - self._begun_bytes

    async def take(self, num_bytes: int) -> Callable[[], None]:
        """Wait until there is room. Returns the function by which the compute thread gives it back.

        One post always fits if no other waits. The limits of its frame bound its size.
        """
        while not self._fits(num_bytes):
            self._changed.clear()
            self._is_awaited = True
            if not self._fits(num_bytes):  # check again: only now `_begin` wakes this task
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
