"""Time that passes at once: a deadline is reached by what a test says, not by a slow machine."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

_passed_s: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()


def let_pass(seconds: float) -> None:
    """The running event loop's clock goes on by so much, for all that wait in it."""
    loop = asyncio.get_running_loop()
    if loop not in _passed_s:
        now = loop.time
        loop.time = lambda: now() + _passed_s[loop]  # type: ignore[method-assign]
    _passed_s[loop] = _passed_s.get(loop, 0.0) + seconds


def somebody_waits_for(seconds: float) -> bool:
    """Whether in the running event loop somebody waits for so long, or for most of it still."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return any(
        seconds / 2 < timer.when() - loop.time() <= seconds
        for timer in timers
        if not timer.cancelled()
    )
