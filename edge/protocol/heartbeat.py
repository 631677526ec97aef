"""How long silence lasts until the other side counts as lost: both show life while they are busy.

A process that dies breaks its connections, which transport notices at once. This is for one that
is stopped or hangs, and for a device that is cut off.
"""

from __future__ import annotations

import asyncio

from edge.transport import Channel, Frame

ALIVE = Frame("alive")
"""Means nothing but that its sender still runs."""

ALIVE_EVERY_S = 0.4

PEER_SILENT_AFTER_S = 2.6
"""Without a byte for so long, a peer is lost to its coordinator, which sees that within 3 s. Who
stops for 2 s is not: that is a silence of 2.4 s at most, with the time since the last sign."""

COORDINATOR_SILENT_AFTER_S = 20.0
"""Likewise a coordinator to its peers. Nobody waits for its end but who wants the memory."""

CUT_OFF_AFTER_S = 1.5
"""Who was silent for so long on one connection, and begins again on another, has lost the first."""

LEAVES_WITHIN_S = 10.0
"""A peer whose user stops it stays so long for those whose models are there."""

_LOOK_EVERY_S = 0.2

LINK_TIMEOUT_S = 3600.0
"""Silence on a link inside a step, whatever the neighbour does: a step that reads a large model
from a slow disk takes many minutes. Who is really gone is noticed sooner, by others: a process
that died by its closed sockets; one that is stopped by the coordinator, which ends the sessions of
all; a device that cannot be reached by the link itself (`edge.transport.tcp_link`); a link that
brings nothing by what its two ends say of it (`edge.runs.dead_links`). So no limit needs to be
guessed from how long steps should take."""


LINK_SILENT_AFTER_S = 1.0
"""Who waits at a link for so long in vain says so, and:"""
LOOK_AT_LINKS_EVERY_S = 0.25


def patience_s(silent_after_s: float, num_bytes: int) -> float:
    """For a frame of this size: who moves no MiB in the time in which silence is a loss is lost."""
    return silent_after_s * (1 + num_bytes / (1 << 20))


async def show_life(channel: Channel) -> None:
    """Send a sign of life a few times a second. Raises what the channel raises.

    A sign waits for the frame that is being sent, whose bytes are one, too.
    """
    while True:
        await asyncio.sleep(ALIVE_EVERY_S)
        await channel.send(ALIVE)


class Hearing:
    """Whether the other side of a channel is heard, by bytes: a large frame may take long.

    Its silence counts while we listen ourselves. A process that was stopped, or whose loop was
    busy, looks too late; it cannot know what it did not hear, so the time that it missed is not
    the other side's.
    """

    def __init__(self, channel: Channel, *, silent_after_s: float) -> None:
        self._channel = channel
        self.silent_after_s = silent_after_s
        self._is_listening = True
        self._silent_s = 0.0

    @property
    def silent_s(self) -> float:
        """For how long the other side has not been heard, as far as that is known."""
        return self._silent_s

    def listening(self) -> None:
        """What arrives is received from now on, as it is at first."""
        self._is_listening = True
        self._silent_s = 0.0

    def not_listening(self) -> None:
        """Until `listening`, silence is of our own making."""
        self._is_listening = False

    async def until_silent(self) -> float:
        """Return when the other side has been silent for too long: for how many seconds."""
        loop = asyncio.get_running_loop()
        heard_bytes, looked_s = self._channel.received_bytes, loop.time()
        while self._silent_s < self.silent_after_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_bytes, now_s = self._channel.received_bytes, loop.time()
            if now_bytes != heard_bytes or not self._is_listening:
                self._silent_s = 0.0
            else:
                self._silent_s += min(now_s - looked_s, 2 * _LOOK_EVERY_S)
            heard_bytes, looked_s = now_bytes, now_s
        return self._silent_s
