"""How long silence lasts until a peer counts as lost: both sides show life while they are busy.

A device that dies breaks its connections, which transport notices.
"""

from __future__ import annotations

import asyncio
import math

from edge.transport import Channel, Frame

ALIVE = Frame("alive")
"""Means nothing but that its sender still runs."""

ALIVE_EVERY_S = 5.0

SILENT_AFTER_S = 60.0
"""Without any frame for so long, the other side counts as lost. Long enough for the largest frame
(8 MiB of logits, a 4 MiB piece of weights) on a link of 140 kB/s."""

LINK_TIMEOUT_S = 120.0
"""Silence on a link inside a step. A dead device is noticed within seconds by the connection
itself; this is for one that hangs, and long because a slow neighbour may take a minute a chunk."""


async def show_life(channel: Channel) -> None:
    """Send a sign of life every few seconds. Raises what the channel raises."""
    while True:
        await asyncio.sleep(ALIVE_EVERY_S)
        await channel.send(ALIVE)


class Hearing:
    """When the other side was heard for the last time."""

    def __init__(self, *, silent_after_s: float) -> None:
        self.silent_after_s = silent_after_s
        self.heard()

    def heard(self) -> None:
        """It spoke, or we begin to listen."""
        self._last_s = asyncio.get_running_loop().time()

    def not_listening(self) -> None:
        """Until `heard`, silence is of our own making."""
        self._last_s = math.inf

    async def until_silent(self) -> None:
        """Return when the other side has been silent for too long."""
        while (left_s := self._left_s()) > 0:  # noqa: ASYNC110 - what is left moves on meanwhile
            await asyncio.sleep(min(left_s, self.silent_after_s))

    def _left_s(self) -> float:
        return self._last_s + self.silent_after_s - asyncio.get_running_loop().time()
