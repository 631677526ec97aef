"""When a device lends nothing for a while: on its battery, in use, or short of memory.

A daemon that begins to rest hands over, as one that its user stops: the coordinators move its part
of their models, and answers go on with the same tokens. It is announced again when it may lend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from edge.concurrency.blocking import run_blocking
from edge.errors import RequestError
from edge.host.free_memory import format_size, free_memory_bytes
from edge.host.identity import on_battery
from edge.peer.settings import PeerSettings
from edge.system.user_activity import unused_s

LOOK_EVERY_S = 5.0

IN_USE_S = 60.0
"""Seconds after a key or a movement for which the device counts as in use."""

IDLE_AFTER_S = 300.0
"""Seconds without any, after which a resting device lends again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What decides whether a device lends."""

    on_battery: bool
    unused_s: float | None
    """None: the system does not tell."""
    free_bytes: int

    @classmethod
    def now(cls, settings: PeerSettings) -> DeviceUse:
        """The state of this device, as far as its settings ask for it. Blocks for a moment."""
        return cls(
            on_battery=settings.on_battery == "off" and on_battery(),
            unused_s=unused_s() if settings.idle_only else None,
            free_bytes=free_memory_bytes(),
        )


def why_rest(settings: PeerSettings, use: DeviceUse, *, rests: bool) -> str | None:
    """Why the device lends nothing now, in words; None: it lends.

    rests: whether it rests already. Then it must be idle for longer, and have twice as much spare
    memory, before it lends: it would begin and end with every key otherwise.
    """
    if settings.on_battery == "off" and use.on_battery:
        return "it runs on its battery"
    idle_s = IDLE_AFTER_S if rests else IN_USE_S
    if settings.idle_only and use.unused_s is not None and use.unused_s < idle_s:
        return "somebody uses it"
    spare = settings.spare_memory_bytes
    if spare is not None and use.free_bytes < spare * (2 if rests else 1):
        return f"only {format_size(use.free_bytes)} of its memory are free"
    return None


class Rest:
    """Watches whether a device lends. look: gives its use now, and may block."""

    def __init__(
        self, settings: PeerSettings, look: Callable[[PeerSettings], DeviceUse] = DeviceUse.now
    ) -> None:
        """Raises RequestError for `--idle-only` on a system that does not tell its use."""
        self._settings = settings
        self._look = look
        self._has_rules = (
            settings.on_battery == "off"
            or settings.idle_only
            or settings.spare_memory_bytes is not None
        )
        self.reason: str | None = None
        """Why it rests; None: it lends."""
        if settings.idle_only and look(settings).unused_s is None:
            raise RequestError(
                "this system does not tell when the device is in use",
                remedy="leave out --idle-only",
            )

    async def begins(self) -> None:
        """Return when the device has to rest, at once if it has to now."""
        while not await self._rests():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(LOOK_EVERY_S)

    async def ends(self) -> None:
        """Return when the device lends again, at once if it does now."""
        while await self._rests():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(LOOK_EVERY_S)

    async def _rests(self) -> bool:
        if not self._has_rules:
            return False
        use = await run_blocking(lambda: self._look(self._settings))
        self.reason = why_rest(self._settings, use, rests=self.reason is not None)
        return self.reason is not None
