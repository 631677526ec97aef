"""The memory of one request, counted in tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge.scheduling.fairness import ANYBODY, Who

Place = Literal["new", "reserving", "memory", "swapping out", "disk", "kept"]
"""Reserving: memory is kept for it, and every shard checks that its disk has room."""


@dataclass(slots=True)
class Resident:
    """The memory of one request."""

    request: str
    length: int
    """Number of its tokens. Its cache has one fewer while the last one is not computed."""
    longest: int
    """Most tokens that it can have."""
    who: Who = ANYBODY
    steps_out: int = 0
    """Its steps under way, which use its cache."""
    place: Place = "new"
    held: int = 0
    """Tokens of memory that are kept for it."""
    room: int = 0
    """Length that it may grow to without new memory."""
    quantum_end: int = 0
    """Length at which it makes room for a request that waits."""
    reserved: int = 0
    """Tokens for which every shard has reserved disk. A request longer than memory passes the
    rest through disk."""
    was_inside: bool = False
    """`settle` has told that it came."""
    overtaken: int = 0
    """Younger requests of its client that have started."""

    @property
    def can_step(self) -> bool:
        """In memory, with room for its last token."""
        return self.place == "memory" and self.length <= self.room
