"""Links that bring nothing any more, though both of their ends live. Pure.

Nobody tells of a cable that was pulled behind a switch, or of a relay that takes bytes and drops
them. But who waits knows how many messages have arrived, and who sends how many it began. While the
sender is ahead, something is on its way: on a link that works, bytes keep arriving, however slowly.
No step has to be guessed the time of: who computes, or reads from a slow disk, is not ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.protocol.topology import Seat

STALLED_AFTER_S = 1.2
"""Without a byte, while the sender is ahead. Who waits tells it after a second of silence, so a
dead link is known within 3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What somebody told who waits at a link."""

    received: int
    """Messages that have arrived whole."""
    since_s: float
    """When the last byte did, by the clock here."""


@dataclass(slots=True, kw_only=True)
class _Ahead:
    received: int
    since_s: float


class DeadLinks:
    """Watches the links of one plan, each by (who waits, who sends)."""

    def __init__(self) -> None:
        self._silences: dict[tuple[Seat, Seat], Silence] = {}
        self._ahead: dict[tuple[Seat, Seat], _Ahead] = {}

    def waits(self, receiver: Seat, sender: Seat, silence: Silence) -> None:
        """It was told again, or for the first time, that nothing arrives."""
        self._silences[receiver, sender] = silence

    def began(self, receiver: Seat, sender: Seat, sent: int, *, now_s: float) -> float | None:
        """The sender was asked after that how many messages it has begun.

        For how long nothing has arrived of what is on its way, once that is too long.
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
