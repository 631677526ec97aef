"""Dead link detection: links that carry nothing although both ends are alive. Pure.

Nothing reports a cable pulled behind a switch, or a relay that drops bytes. But a receiver knows
how many messages have arrived, and a sender how many it began. While the sender is ahead, bytes
must arrive, however slowly. So no step time has to be guessed: a sender that computes, or reads
from a slow disk, is not ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.protocol.topology import Seat

STALLED_AFTER_S = 1.2
"""Seconds without a byte while the sender is ahead. Receivers report after a second of silence, so
a dead link is detected within 3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The report of a receiver that waits at a link."""

    received: int
    """Messages that have arrived completely."""
    since_s: float
    """When the last byte arrived, by the local clock."""


@dataclass(slots=True, kw_only=True)
class _Ahead:
    received: int
    since_s: float


class DeadLinks:
    """Watches the links of one plan, by (receiver, sender)."""

    def __init__(self) -> None:
        self._silences: dict[tuple[Seat, Seat], Silence] = {}
        self._ahead: dict[tuple[Seat, Seat], _Ahead] = {}

    def waits(self, receiver: Seat, sender: Seat, silence: Silence) -> None:
        """Record a receiver's report."""
        self._silences[receiver, sender] = silence

    def began(self, receiver: Seat, sender: Seat, sent: int, *, now_s: float) -> float | None:
        """Record the sender's answer to the question that follows a report: messages begun.

        Returns the seconds without a byte once the link counts as dead, otherwise None.
        """
        link = receiver, sender
        silence = self._silences.get(link)
        if silence is None or sent <= silence.received:
            self._ahead.pop(link, None)
            return None
        ahead = self._ahead.get(link)
        # A byte that came meanwhile is a sign of life.
        if ahead is None or ahead.received != silence.received or silence.since_s > ahead.since_s:
            ahead = self._ahead[link] = _Ahead(received=silence.received, since_s=now_s)
        waited_s = now_s - ahead.since_s
        return waited_s if waited_s >= STALLED_AFTER_S else None
