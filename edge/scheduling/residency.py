"""Residency of keys and values: whose are in memory, and whose wait on disk for their turn.

Pure: counts of tokens in, decisions out. Every shard keeps the same tokens of a request (of its own
layers and heads), so a number of tokens means the same to all of them.

A request starts when the disk, or the memory alone, has room for the longest that all started ones
may become: whatever happens then, somebody can go on. Who starts next, `fairness.py`
says. Once started it waits for memory for what it has and a
quantum of new tokens, first come, first served. While somebody waits, who has had its quantum goes
to disk and to the end of the line; else it gets another. So no request waits for more than one
quantum of each of the others.

Of who waits to start, those go first that begin with what memory has, but nobody is overtaken for
ever. So requests with a common beginning come one after the other.

What a request that is over leaves behind is kept in memory that nobody else needs, for who begins
with the same tokens. The one goes first that is cheapest to compute again for the memory that it
takes; but what was not used for long becomes cheap (GreedyDual-Size: Cao and Irani, 1997).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from edge.scheduling.fairness import ANYBODY, FairShares, Who

QUANTUM_TOKENS = 64
"""New tokens before a request makes room for one that waits: moving a cache takes as long as
computing a few tokens."""

MOST_OVERTAKEN = 32
"""Most requests of a client that start before an older one of it; no more of them are looked at."""

Place = Literal["new", "reserving", "memory", "swapping out", "disk", "kept"]
"""Reserving: memory is kept for it, and every shard sees whether the disk has room, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What changed; each request is told of once."""

    came: tuple[str, ...] = ()
    """New in memory."""
    swap_out: tuple[str, ...] = ()
    """To be moved to disk by every shard; then `swapped_out`."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each that is longer than memory, for which every shard's disk must have room; then
    `reserved`, or `leave` where one has not."""
    stuck: str | None = None
    """Who must leave for the others to go on, now that the disk takes nobody. Nothing else changed
    then."""


@dataclass(slots=True)
class Resident:
    """A request, as far as memory is concerned."""

    request: str
    length: int
    """Tokens it has; one more than is in its cache while it waits for its next."""
    longest: int
    """Tokens it may grow to."""
    who: Who = ANYBODY
    steps_out: int = 0
    """Steps of it that are under way: its cache is in use."""
    place: Place = "new"
    held: int = 0
    """Tokens of memory that are kept for it."""
    room: int = 0
    """Tokens it may grow to before it asks again."""
    quantum_end: int = 0
    """Length at which it makes room for who waits."""
    reserved: int = 0
    """Tokens that every shard's disk has room for: as many as are computed by way of it."""
    was_inside: bool = False
    """`settle` has told of it."""
    overtaken: int = 0
    """Requests of its client that came later, and have started."""
    worth_from: float = 0.0
    """For a kept request: worth of the one that was evicted last before it was last used."""

    @property
    def can_step(self) -> bool:
        """In memory, with room for its last token."""
        return self.place == "memory" and self.length <= self.room


class Residency:
    """`settle` decides; the other verbs tell it what happened."""

    def __init__(
        self,
        *,
        memory_tokens: int,
        disk_tokens: int = 0,
        longest_tokens: int | None = None,
        requests: int,
        quantum_tokens: int = QUANTUM_TOKENS,
        held: Callable[[int], int] = lambda tokens: tokens,
        most_kept: int = 0,
    ) -> None:
        """Memory is kept for `memory_tokens`; with `disk_tokens` more may be under way.

        `held`: how many of these N tokens of one request take, N or more. One that has all the
        memory may take a little more.

        Up to `longest_tokens` of one request can be computed, a part of them on disk, when it has
        all the memory for itself; None: as many as memory is kept for.
        """
        self._memory = self._free = memory_tokens
        self._disk = disk_tokens
        self._longest = memory_tokens
        if longest_tokens is not None and disk_tokens:
            self._longest = max(memory_tokens, min(longest_tokens, disk_tokens))
        self._requests = requests
        self._quantum_tokens = quantum_tokens
        self._held = held
        self.shares = FairShares()
        """Whoever joins must have come there."""
        self._new: dict[Who, deque[Resident]] = {}
        """By who asked, none of them empty."""
        self._ready: deque[Resident] = deque()
        """Started, without memory; the first gets it next."""
        self._inside: list[Resident] = []
        """In memory or leaving it, in the order they came."""
        self._most_kept = most_kept
        self._kept: dict[str, Resident] = {}
        """Over, and still in memory: of what is free. The longest unused first."""
        self._worth = 0.0
        """Worth of the last of them that was evicted."""
        self.found: Callable[[str], int] = lambda _request: 0
        """How many tokens of a request that is to start memory has."""
        self._swap_out: list[str] = []
        self._reserve: dict[str, int] = {}
        """What `settle` has to tell."""
        self._disk_is_full = False

    def join(self, resident: Resident) -> None:
        """Raises ValueError for one that could never start."""
        if resident.longest > self._longest:
            raise ValueError(f"{resident.longest} tokens never fit into {self._longest}")
        self._new.setdefault(resident.who, deque()).append(resident)

    def leave(self, resident: Resident) -> None:
        """The request is over, wherever its cache is."""
        if resident in self._inside:
            self._inside.remove(resident)
            self._free += resident.held
        if resident in self._ready:
            self._ready.remove(resident)
        if resident in self._new.get(resident.who, ()):
            self._take_new(resident)
        self._disk_is_full = False  # what it had there is free

    def keep(self, resident: Resident) -> bool:
        """The request is over, and its cache stays until it is in the way; False: it `leave`s."""
        fits = resident.longest <= self._memory and self._price(resident.length) <= self._memory
        stays = bool(self._most_kept) and resident.place == "memory" and fits
        self.leave(resident)
        if stays:
            resident.place, resident.held = "kept", self._price(resident.length)
            resident.worth_from = self._worth
            self._kept[resident.request] = resident
        return stays

    @property
    def kept(self) -> tuple[str, ...]:
        """Requests whose caches are kept, the last used first."""
        return tuple(reversed(self._kept))

    def used(self, request: str) -> None:
        """A kept cache was of use: others go before it."""
        resident = self._kept[request] = self._kept.pop(request)
        resident.worth_from = self._worth

    def drop(self, request: str) -> None:
        """A kept cache is another request's from now on, or nobody's."""
        del self._kept[request]

    def can_keep(self, request: str) -> bool:
        """Whether the kept cache finds room once all other kept ones are gone."""
        return not self._is_crowded and self._kept[request].held <= self._free

    def evict(
        self,
        cost: Callable[[str, Collection[str]], float] = lambda _request, _others: 1.0,
        spared: Collection[str | None] = (),
    ) -> tuple[str, ...]:
        """The kept caches that are in somebody's way, but for these: they are gone.

        cost: of computing one again, while the others are kept.
        """
        gone = []
        while self._is_in_the_way:
            worth = {
                request: resident.worth_from + cost(request, self._kept) / max(1, resident.held)
                for request, resident in self._kept.items()
                if request not in spared
            }
            if not worth:
                break
            least = min(worth, key=worth.__getitem__)
            self._worth = max(self._worth, worth[least])
            gone.append(least)
            del self._kept[least]
        return tuple(gone)

    @property
    def _is_in_the_way(self) -> bool:
        """What is kept."""
        held = sum(resident.held for resident in self._kept.values())
        is_much = held > self._free or len(self._kept) > self._most_kept
        return bool(self._kept) and (is_much or self._is_crowded)

    @property
    def _is_crowded(self) -> bool:
        """Somebody has all the memory for itself, or more."""
        return any(resident.longest > self._memory for resident in self._inside)

    @property
    def num_inside(self) -> int:
        """Requests that may take part in a step."""
        return sum(resident.place == "memory" for resident in self._inside)

    @property
    def awaits_room(self) -> bool:
        """Somebody could come into memory, if those there let a run end now."""
        coming = self._ready[0] if self._ready else self._startable(self._first_new)
        if coming is None:
            return False
        wanted = self._price(self._needed(coming))
        return wanted <= self._free or (
            not self._disk_is_full
            and any(
                resident.place == "memory"
                and (self._is_over(resident) or self._spare(resident) > 0)
                for resident in self._inside
            )
        )

    def settle(self) -> Settled:
        """Let in whom there is memory for, and have others leave."""
        self._admit()
        if self._ready and not self._disk_is_full:
            for resident in self._inside:
                self._shrink(resident)
            self._admit()
        if self._ready and not self._disk_is_full:
            self._end_quanta()
        else:
            for resident in self._inside:
                self._extend(resident)
        came = [m for m in self._inside if m.place == "memory" and not m.was_inside]
        for resident in came:
            resident.was_inside = True
        settled = Settled(
            came=tuple(resident.request for resident in came),
            swap_out=tuple(self._swap_out),
            reserve=dict(self._reserve),
            stuck=self._stuck,
        )
        self._swap_out.clear()
        self._reserve.clear()
        return settled

    def reserved(self, resident: Resident) -> None:
        """Every shard's disk has that room; one for which there is none has to leave."""
        if resident.place != "reserving":
            raise ValueError("a request that was to reserve nothing")
        resident.place = "memory"
        resident.reserved = resident.room

    def swapped_out(self, resident: Resident, *, moved: bool) -> None:
        """The cache is on every shard's disk; or one has no room, and it stays where it is."""
        if resident.place != "swapping out":
            raise ValueError("a request that was not to be swapped out")
        if moved:
            resident.place = "disk"
            self._inside.remove(resident)
            self._free += resident.held
            resident.held = 0
            self._ready.append(resident)
        else:
            resident.place = "memory"
            resident.quantum_end = resident.length + self._quantum_tokens
            self._disk_is_full = True

    @property
    def _stuck(self) -> str | None:
        if not self._disk_is_full or not self._inside:
            return None
        if any(m.steps_out or m.can_step or m.place != "memory" for m in self._inside):
            return None
        return self._inside[-1].request

    @property
    def _started(self) -> tuple[Resident, ...]:
        return (*self._inside, *self._ready)

    @property
    def _first_new(self) -> Resident | None:
        return self._new[self.shares.first(self._new)][0] if self._new else None

    @property
    def _next_new(self) -> Resident | None:
        """Who starts now: of those whose turn it is, the one of which memory has most."""
        first = self._first_new
        if first is None or len(self._started) >= self._requests:
            return None
        if first.overtaken < MOST_OVERTAKEN:
            line = list(islice(self._new[first.who], MOST_OVERTAKEN))
            if len(line) > 1:
                nearest = max(line, key=lambda resident: self.found(resident.request))
                if self._startable(nearest) is not None:
                    return nearest
        return self._startable(first)

    def _take_new(self, resident: Resident) -> Resident:
        line = self._new[resident.who]
        line.remove(resident)
        if not line:
            del self._new[resident.who]
        return resident

    def _startable(self, resident: Resident | None) -> Resident | None:
        """This one, if it may start."""
        if resident is None or len(self._started) >= self._requests:
            return None
        longest = [each.longest for each in (*self._started, resident)]
        disk = 0 if self._disk_is_full else self._disk
        fits = sum(longest) <= disk or sum(map(self._price, longest)) <= self._memory
        return resident if fits else None

    def _price(self, tokens: int) -> int:
        """Tokens of memory that N tokens of one request take."""
        return tokens if tokens >= self._memory else min(self._held(tokens), self._memory)

    def _needed(self, resident: Resident) -> int:
        """Tokens in memory for another quantum; one that is too long for memory takes all."""
        if not self._disk:
            return resident.longest
        return min(resident.longest, resident.length + self._quantum_tokens, self._memory)

    def _is_over(self, resident: Resident) -> bool:
        """It has had its quantum, or cannot go on where it is."""
        return resident.length > min(resident.quantum_end, resident.room)

    def _spare(self, resident: Resident) -> int:
        """Tokens of memory that it does not need for the rest of its quantum."""
        return max(0, resident.held - self._price(max(resident.length, resident.quantum_end)))

    def _admit(self) -> None:
        while (resident := self._next_new) is not None:
            for other in islice(self._new[resident.who], self._new[resident.who].index(resident)):
                other.overtaken += 1
            self._ready.append(self._take_new(resident))
        while self._ready and self._price(self._needed(self._ready[0])) <= self._free:
            resident = self._ready.popleft()
            resident.place = "memory"
            resident.quantum_end = resident.length + self._quantum_tokens
            self._grant(resident, self._needed(resident))
            self._inside.append(resident)

    def _grant(self, resident: Resident, tokens: int) -> None:
        held = self._price(tokens)
        self._free -= held - resident.held
        resident.held = held
        is_too_long = min(resident.longest, resident.length + self._quantum_tokens) > self._memory
        resident.room = resident.quantum_end if is_too_long else tokens
        resident.room = min(resident.room, resident.longest)
        if is_too_long and resident.room > resident.reserved:
            # While it computes, what does not fit must find room: no shard may fail in a step.
            resident.place = "reserving"
            self._reserve[resident.request] = resident.room

    def _shrink(self, resident: Resident) -> None:
        """Keep only what its quantum needs: somebody waits."""
        if resident.place != "memory" or resident.steps_out:
            return
        spare = self._spare(resident)
        self._free += spare
        resident.held -= spare
        if resident.room > resident.quantum_end:
            resident.room = max(resident.quantum_end, min(resident.room, resident.length))

    def _end_quanta(self) -> None:
        """Those who were here longest leave, until there is memory for the next."""
        coming = self._free + sum(m.held for m in self._inside if m.place == "swapping out")
        for resident in self._inside:
            if coming >= self._price(self._needed(self._ready[0])):
                return
            if resident.place == "memory" and not resident.steps_out and self._is_over(resident):
                coming += resident.held
                self._send_away(resident)

    def _send_away(self, resident: Resident) -> None:
        resident.place = "swapping out"
        self._swap_out.append(resident.request)

    def _extend(self, resident: Resident) -> None:
        """Nobody waits: all the memory it may ever want, or at least another quantum."""
        if resident.place != "memory" or resident.steps_out or resident.room >= resident.longest:
            return
        available = self._free + resident.held
        started = sum(self._price(each.longest) for each in self._started)
        if self._price(resident.longest) <= available and started <= self._memory:
            self._grant(resident, resident.longest)
        elif resident.length > resident.room:
            needed = self._needed(resident)
            price = self._price(needed)
            coming = sum(m.held for m in self._inside if m.place == "swapping out")
            if price <= available:
                resident.quantum_end = resident.length + self._quantum_tokens
                self._grant(resident, needed)
            elif price > available + coming and not self._disk_is_full:
                self._send_away(resident)
