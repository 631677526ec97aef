"""Presence (failure detection): which daemons are alive, as seen by one observer. Pure: no network,
no clock.

A daemon has a permanent id and an epoch, which its device increases at each start; clocks need not
agree. The observer numbers its rounds of looking, and each observation has its round's number.

Knowledge is a semilattice (every field is a minimum, a maximum or a union), so observations may
come late, twice or in any order and give the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal["unknown", "alive", "silent", "lost", "leaving", "left"]

MOST_EPOCHS = 4
"""Most epochs of one device that are remembered: the greatest ones."""

_MISSES_OF_LOST = 2
"""Missed answers in a row after which a silent daemon counts as lost."""

_MOST_BREAKS = 8

MOST_IDS = 1024
"""Most ids that an observer remembers. More mean that the network is being flooded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The daemon answered, and said whether it is leaving."""

    id: str
    epoch: int
    number: int
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The daemon was asked and did not answer."""

    id: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke:
    """A connection ended that the daemon had not closed."""

    id: str
    epoch: int
    number: int


Sighting = Heard | Missed | Broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """What is known of one start of a daemon."""

    epoch: int
    first: int | None = None
    """Rounds of the first and last answer."""
    last: int | None = None
    leaves: int | None = None
    """Round in which it first said that it is leaving."""
    misses: frozenset[int] = frozenset()
    """The latest ones."""
    breaks: frozenset[int] = frozenset()
    """The latest ones."""

    def __or__(self, other: Incarnation) -> Incarnation:
        assert self.epoch == other.epoch
        return Incarnation(
            epoch=self.epoch,
            first=_one_of(min, self.first, other.first),
            last=_one_of(max, self.last, other.last),
            leaves=_one_of(min, self.leaves, other.leaves),
            misses=_greatest(self.misses | other.misses, _MISSES_OF_LOST),
            breaks=_greatest(self.breaks | other.breaks, _MOST_BREAKS),
        )

    @property
    def state(self) -> State:
        """The state of this start. After leaving, later observations of the epoch do not revive
        it."""
        if self.leaves is not None:
            gone = any(number > self.leaves for number in (*self.misses, *self.breaks))
            return "left" if gone else "leaving"
        last = -1 if self.last is None else self.last
        missed = sum(number > last for number in self.misses)
        if any(number > last for number in self.breaks) or missed >= _MISSES_OF_LOST:
            return "lost"
        if missed:
            return "silent"
        return "unknown" if self.last is None else "alive"

    @property
    def is_there(self) -> bool:
        return self.state in ("alive", "silent", "leaving")

    def was_there_with(self, other: Incarnation) -> bool:
        """Whether the two were heard in overlapping rounds, which no restart explains."""
        if self.first is None or self.last is None or other.first is None or other.last is None:
            return False
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What is known of one id."""

    incarnations: Mapping[int, Incarnation] = field(default_factory=dict)
    """Starts by epoch."""

    def __or__(self, other: Presence) -> Presence:
        found = dict(self.incarnations)
        for epoch, each in other.incarnations.items():
            found[epoch] = found[epoch] | each if epoch in found else each
        kept = sorted(found)[-MOST_EPOCHS:]
        return replace(self, incarnations={epoch: found[epoch] for epoch in kept})

    def seen(self, sighting: Sighting) -> Presence:
        return self | Presence(incarnations={sighting.epoch: _incarnation(sighting)})

    @property
    def current(self) -> Incarnation | None:
        """The start to use: the latest one, however late earlier ones are heard of. If two are
        there at once (copies with the same keys), the one that was there first, until it is
        gone."""
        if not self.incarnations:
            return None
        there = [each for each in self._latest() if each.is_there]
        if there:
            return min(there, key=lambda each: (each.first or 0, each.epoch))
        return self.incarnations[max(self.incarnations)]

    @property
    def copies(self) -> tuple[Incarnation, ...]:
        """Other starts that are there at the same time, with the same keys."""
        current = self.current
        return tuple(
            each
            for each in self._latest()
            if current is not None
            and current.is_there
            and each.is_there
            and each.epoch != current.epoch
        )

    @property
    def state(self) -> State:
        return "unknown" if self.current is None else self.current.state

    @property
    def losses(self) -> int:
        """Number of remembered losses without a goodbye."""
        ends = {each.epoch for each in self.incarnations.values()} - {
            each.epoch for each in self._latest() if each.is_there
        }
        return sum(
            max(len(each.breaks), int(each.epoch in ends and each.leaves is None))
            for each in self.incarnations.values()
        )

    def _latest(self) -> list[Incarnation]:
        """Starts without those that ended before a later start of the same device."""
        every = self.incarnations.values()
        return [
            each
            for each in every
            if not any(
                other.epoch > each.epoch and not each.was_there_with(other) for other in every
            )
        ]


class Presences:
    """What one observer knows of all devices, and where it saw them."""

    def __init__(self) -> None:
        self._known: dict[str, Presence] = {}
        self._places: dict[tuple[str, int], str] = {}
        self._number = 0

    def look(self) -> int:
        """Begin a round and return its number."""
        self._number += 1
        return self._number

    def saw(self, sighting: Sighting, place: str | None = None) -> None:
        """Record an observation. place: where, for display."""
        known = self._known.get(sighting.id)
        if known is None:
            if len(self._known) >= MOST_IDS:
                return
            known = Presence()
        self._known[sighting.id] = known.seen(sighting)
        if place is not None:
            epochs = self._known[sighting.id].incarnations
            self._places = {
                (id, epoch): each
                for (id, epoch), each in self._places.items()
                if id != sighting.id or epoch in epochs
            } | {(sighting.id, sighting.epoch): place}

    def of(self, id: str) -> Presence:
        return self._known.get(id, Presence())

    def place(self, id: str, epoch: int) -> str:
        """Where this start was seen last."""
        return self._places.get((id, epoch), "another place")


def _incarnation(sighting: Sighting) -> Incarnation:
    number = sighting.number
    if isinstance(sighting, Missed):
        return Incarnation(epoch=sighting.epoch, misses=frozenset({number}))
    if isinstance(sighting, Broke):
        return Incarnation(epoch=sighting.epoch, breaks=frozenset({number}))
    leaves = number if sighting.is_leaving else None
    return Incarnation(epoch=sighting.epoch, first=number, last=number, leaves=leaves)


def _one_of(which: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else which(one, other)


def _greatest(numbers: frozenset[int], most: int) -> frozenset[int]:
    return frozenset(sorted(numbers)[-most:])
