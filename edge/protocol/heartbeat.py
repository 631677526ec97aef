"""Heartbeats: both sides show life, also while they are busy; after a time of silence the other
side counts as lost.

A process that dies closes its connections, which transport notices at once. Heartbeats are for a
process that is stopped or hangs, and for a device that is cut off.
"""

from __future__ import annotations

import asyncio

from edge.transport import Channel, Frame

ALIVE = Frame("alive")
"""A heartbeat: its sender still runs."""

ALIVE_EVERY_S = 0.4

PEER_SILENT_AFTER_S = 2.6
"""A coordinator counts a peer as lost after this time without a byte, and notices it within 3 s. A
pause of 2 s is not a loss: it is a silence of at most 2.4 s with the time since the last
heartbeat. A peer whose heartbeats were late before has longer: see `UsualGaps`."""

PEER_SILENT_AT_MOST_S = 12.0
"""The longest that a late peer has. It is shorter than the time after which the peer gives up its
coordinator."""

COORDINATOR_SILENT_AFTER_S = 20.0
"""A peer counts a coordinator as lost after this time. The time is longer, because only the memory
waits to be freed."""

CUT_OFF_AFTER_S = 1.5
"""A coordinator that was silent this long on one connection and opens another has lost the
first."""

LEAVES_WITHIN_S = 10.0
"""A peer that its user stops stays this long for coordinators with models there."""

_LOOK_EVERY_S = 0.2

_CALMS_DOWN_BY = 1 / 32
"""The part by which a gap lowers the deviation of `UsualGaps`."""

LINK_TIMEOUT_S = 3600.0
"""Limit of silence on a link within a step. A step that reads a large model from a slow disk takes
many minutes, so the limit is long. Losses are noticed sooner by other means: a dead process by its
closed sockets; a stopped process by the coordinator, which ends all sessions; an unreachable device
by the link itself (`edge.transport.tcp_link`); a dead link by the reports of both its ends
(`edge.runs.dead_links`). So no limit depends on the predicted time of a step."""


LINK_SILENT_AFTER_S = 1.0
"""A peer that waits at a link for this long reports it."""
LOOK_AT_LINKS_EVERY_S = 0.25


def patience_s(silent_after_s: float, num_bytes: int) -> float:
    """Time limit for sending a frame of this size: a side that moves less than 1 MiB in
    `silent_after_s` counts as lost."""
    return silent_after_s * (1 + num_bytes / (1 << 20))


async def show_life(channel: Channel) -> None:
    """Send a heartbeat a few times a second. Raises the channel's errors.

    A heartbeat waits for the frame that is being sent, whose bytes show life, too.
    """
    while True:
        await asyncio.sleep(ALIVE_EVERY_S)
        await channel.send(ALIVE)


class UsualGaps:
    """The time until the next byte of a channel, estimated from the gaps before.

    It is the retransmission timer of RFC 6298: the smoothed mean plus four smoothed deviations.
    The mean has its gain of 1/8. A larger deviation counts at once, nearly as in Linux's TCP
    (`tcp_rtt_estimator`). Smaller ones lower the estimate slowly, by half in some ten seconds of
    heartbeats, because the pauses of a device at full load may come seconds apart.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def note(self, gap_s: float) -> None:
        """Record the seconds between two bytes, or two groups of them."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = gap_s, gap_s / 2
            return
        off_s = gap_s - self._mean_s
        gain = 1 if abs(off_s) > self._deviation_s else _CALMS_DOWN_BY
        self._deviation_s += gain * (abs(off_s) - self._deviation_s)
        self._mean_s += off_s / 8

    def longest_s(self) -> float:
        """The longest gap to be expected; 0 without any gap before."""
        return 0.0 if self._mean_s is None else self._mean_s + 4 * self._deviation_s


class Hearing:
    """The silence of a channel's other side, by received bytes, because a large frame may take
    long.

    Silence counts only while this process listens. A process that was stopped, or whose event loop
    was busy, checks late. It cannot know what it missed, so that time does not count as silence.
    """

    def __init__(
        self, channel: Channel, *, silent_after_s: float, at_most_s: float | None = None
    ) -> None:
        """silent_after_s: the limit of silence. at_most_s: how far it grows with the gaps that the
        other side's bytes have; None: it does not."""
        self._channel = channel
        self.silent_after_s = silent_after_s
        self._at_most_s = at_most_s
        self._gaps = UsualGaps()
        self._is_listening = True
        self._silent_s = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds of silence of the other side, as far as known."""
        return self._silent_s

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the other side counts as lost now."""
        if self._at_most_s is None:
            return self.silent_after_s
        return max(self.silent_after_s, min(self._gaps.longest_s(), self._at_most_s))

    def listening(self) -> None:
        """Received bytes count from now on, as they do at first."""
        self._is_listening = True
        self._silent_s = 0.0

    def not_listening(self) -> None:
        """Ignore silence until `listening`, because this process does not receive."""
        self._is_listening = False

    async def until_silent(self) -> float:
        """Wait until the other side has been silent for `limit_s`; returns the seconds of
        silence."""
        loop = asyncio.get_running_loop()
        heard_bytes, looked_s = self._channel.received_bytes, loop.time()
        while self._silent_s < self.limit_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_bytes, now_s = self._channel.received_bytes, loop.time()
            since_s = self._silent_s + min(now_s - looked_s, 2 * _LOOK_EVERY_S)
            if not self._is_listening:
                self._silent_s = 0.0
            elif now_bytes != heard_bytes:
                self._gaps.note(since_s)
                self._silent_s = 0.0
            else:
                self._silent_s = since_s
            heard_bytes, looked_s = now_bytes, now_s
        return self._silent_s
