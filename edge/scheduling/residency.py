"""Residency: which requests have their keys and values in memory, and which wait on disk. Pure.

Every shard keeps the same tokens of a request (of its own layers and heads), so a number of tokens
means the same to all of them.

A request starts when the disk, or the memory alone, has room for the longest that all started
requests may become: so one of them can always go on. `start_line.py` says which starts next. A
started request waits for memory for its tokens and a quantum of new ones, first come, first served.
While a request waits, another that has had its quantum goes to disk and to the end of the line. So
no request waits longer than one quantum of each other request.

Free memory keeps the caches of finished requests (`kept_caches.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edge.scheduling.fairness import FairShares
from edge.scheduling.kept_caches import KeptCaches
from edge.scheduling.resident import Resident
from edge.scheduling.start_line import StartLine

QUANTUM_TOKENS = 64
"""New tokens before a request makes room for one that waits. Moving a cache takes as long as
computing a few tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Changes, each told once."""

    came: tuple[str, ...] = ()
    """Requests that are new in memory."""
    swap_out: tuple[str, ...] = ()
    """Requests that every shard moves to disk; `swapped_out` tells the outcome."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """Tokens of requests longer than memory, for which every shard's disk must have room;
    `reserved` or `leave` tells the outcome."""
    stuck: str | None = None
    """The request that must leave so that others can go on, because the disk is full. Nothing else
    has changed then."""


class Residency:
    """`settle` decides; the other methods record events."""

    def __init__(
        self,
        *,
        memory_tokens: int,
        disk_tokens: int = 0,
        longest_tokens: int | None = None,
        requests: int,
        quantum_tokens: int = QUANTUM_TOKENS,
        held: Callable[[int], int] = lambda tokens: tokens,
        memory: int | None = None,
        most_kept: int = 0,
    ) -> None:
        """memory_tokens: tokens of all requests that fit in memory. disk_tokens: and on disk.

        longest_tokens: of one request with all memory for itself and a part of them on disk; None:
        as many as fit in memory. requests: most started at once. held: memory that N tokens of one
        request take; one with all the memory may take a little more. memory: all of it, in the unit
        of `held`; None: tokens. most_kept: caches of finished requests that stay.
        """
        self._tokens = memory_tokens
        """Tokens of one request that fit in memory."""
        self._memory = self._free = memory_tokens if memory is None else memory
        self._disk = disk_tokens
        longest = memory_tokens if longest_tokens is None else min(longest_tokens, disk_tokens)
        self._longest = max(memory_tokens, longest)
        self._requests = requests
        self._quantum_tokens = quantum_tokens
        self._held = held
        self.shares = FairShares()
        """Fair queueing. Call its `come` for a request before `join`."""
        self._new = StartLine(self.shares)
        self._ready: deque[Resident] = deque()
        """Started requests without memory; the first gets it next."""
        self._inside: list[Resident] = []
        """Requests in memory or leaving it, in the order of their coming."""
        self.kept = KeptCaches(most_kept, self._room_for_kept)
        """Caches of finished requests, in memory that is free."""
        self.found: Callable[[str], int] = lambda _request: 0
        """Tokens of a request, before its start, that memory has."""
        self._swap_out: list[str] = []
        self._reserve: dict[str, int] = {}
        """For `settle` to tell, like the one before."""
        self._disk_is_full = False

    def join(self, resident: Resident) -> None:
        """A new request. Raises ValueError for one that could never start."""
        if resident.longest > self._longest:
            raise ValueError(f"{resident.longest} tokens never fit into {self._longest}")
        self._new.join(resident)

    def leave(self, resident: Resident) -> None:
        """The request is over; its cache is freed in memory and on disk."""
        if resident in self._inside:
            self._inside.remove(resident)
            self._free += resident.held
        if resident in self._ready:
            self._ready.remove(resident)
        if resident in self._new:
            self._new.leave(resident)
        self._disk_is_full = False  # what it had there is free

    def keep(self, resident: Resident) -> bool:
        """The request is over, and its cache stays until it is evicted. Returns False if it does
        not stay."""
        price = self._price(resident.length)
        fits = resident.longest <= self._tokens and price <= self._memory
        stays = bool(self.kept.most) and resident.place == "memory" and fits
        self.leave(resident)
        if stays:
            resident.place, resident.held = "kept", price
            self.kept.add(resident.request, price)
        return stays

    def _room_for_kept(self) -> int:
        """Memory that kept caches may hold: none while one request has all of it."""
        is_crowded = any(resident.longest > self._tokens for resident in self._inside)
        return 0 if is_crowded else self._free

    @property
    def num_inside(self) -> int:
        """Number of requests that may take part in a step."""
        return sum(resident.place == "memory" for resident in self._inside)

    @property
    def awaits_room(self) -> bool:
        """A request could come into memory if the current run ended now."""
        coming = self._ready[0] if self._ready else self._new.first
        if coming is None or not (self._ready or self._can_start(coming)):
            return False
        return self._price(self._needed(coming)) <= self._free or (
            not self._disk_is_full
            and any(
                resident.place == "memory"
                and (self._is_over(resident) or self._spare(resident) > 0)
                for resident in self._inside
            )
        )

    def settle(self) -> Settled:
        """Let requests into memory, and have others leave it."""
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
        """Every shard's disk has the room that was asked for."""
        if resident.place != "reserving":
            raise ValueError("a request that was to reserve nothing")
        resident.place = "memory"
        resident.reserved = resident.room

    def swapped_out(self, resident: Resident, *, moved: bool) -> None:
        """moved: the cache is on every shard's disk; False: a disk is full, and the cache stays."""
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

    def _can_start(self, resident: Resident) -> bool:
        longest = [each.longest for each in (*self._started, resident)]
        disk = 0 if self._disk_is_full else self._disk
        fits = sum(longest) <= disk or sum(map(self._price, longest)) <= self._memory
        return fits and len(longest) <= self._requests

    def _price(self, tokens: int) -> int:
        """Memory that N tokens of one request take."""
        beyond = tokens - self._tokens
        return self._memory + beyond if beyond >= 0 else min(self._held(tokens), self._memory)

    def _needed(self, resident: Resident) -> int:
        """Tokens that need memory for another quantum; a request longer than memory takes all."""
        if not self._disk:
            return resident.longest
        return min(resident.longest, resident.length + self._quantum_tokens, self._tokens)

    def _is_over(self, resident: Resident) -> bool:
        """It has had its quantum, or has no room to go on."""
        return resident.length > min(resident.quantum_end, resident.room)

    def _spare(self, resident: Resident) -> int:
        """Memory beyond the rest of its quantum."""
        return max(0, resident.held - self._price(max(resident.length, resident.quantum_end)))

    def _admit(self) -> None:
        while len(self._started) < self._requests and (  # else prefixes are looked up in vain
            resident := self._new.next(self.found, self._can_start)
        ):
            self._new.start(resident)
            self._ready.append(resident)
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
        is_too_long = min(resident.longest, resident.length + self._quantum_tokens) > self._tokens
        resident.room = resident.quantum_end if is_too_long else tokens
        resident.room = min(resident.room, resident.longest)
        if is_too_long and resident.room > resident.reserved:
            # The part that does not fit must find room on disk: no shard may fail in a step.
            resident.place = "reserving"
            self._reserve[resident.request] = resident.room

    def _shrink(self, resident: Resident) -> None:
        """Keep only the memory of its quantum, because another request waits."""
        if resident.place != "memory" or resident.steps_out:
            return
        self._free += (spare := self._spare(resident))
        resident.held -= spare
        if resident.room > resident.quantum_end:
            resident.room = max(resident.quantum_end, min(resident.room, resident.length))

    def _end_quanta(self) -> None:
        """The requests that were here longest leave, until there is memory for the next."""
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
        """No request waits: give it all the memory that it may need, or at least another
        quantum."""
        if resident.place != "memory" or resident.steps_out or resident.room >= resident.longest:
            return
        available, needed = self._free + resident.held, self._needed(resident)
        started = sum(self._price(each.longest) for each in self._started)
        if self._price(resident.longest) <= available and started <= self._memory:
            self._grant(resident, resident.longest)
        elif resident.length > resident.room:
            price = self._price(needed)
            coming = sum(m.held for m in self._inside if m.place == "swapping out")
            if price <= available:
                resident.quantum_end = resident.length + self._quantum_tokens
                self._grant(resident, needed)
            elif price > available + coming and not self._disk_is_full:
                self._send_away(resident)
