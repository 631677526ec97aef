"""The line of requests that have not started. Pure.

Fair queueing says which client is next. Of its requests, the one of which memory has most starts,
but none is overtaken for ever. So requests with a common prefix come one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from edge.scheduling.fairness import FairShares, Who
from edge.scheduling.resident import Resident

MOST_OVERTAKEN = 32
"""Most younger requests of a client that start before an older one; no more are looked at."""


class StartLine:
    """Requests that have not started, by client."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._lines: dict[Who, deque[Resident]] = {}
        """None of them is empty."""

    def __contains__(self, resident: Resident) -> bool:
        return resident in self._lines.get(resident.who, ())

    def join(self, resident: Resident) -> None:
        self._lines.setdefault(resident.who, deque()).append(resident)

    def leave(self, resident: Resident) -> None:
        line = self._lines[resident.who]
        line.remove(resident)
        if not line:
            del self._lines[resident.who]

    @property
    def first(self) -> Resident | None:
        """The oldest request of the client that is next."""
        return self._lines[self._shares.first(self._lines)][0] if self._lines else None

    def next(
        self, found: Callable[[str], int], can_start: Callable[[Resident], bool]
    ) -> Resident | None:
        """The request that starts now. found: tokens of a request that memory has."""
        first = self.first
        if first is None:
            return None
        if first.overtaken < MOST_OVERTAKEN:
            line = list(islice(self._lines[first.who], MOST_OVERTAKEN))
            if len(line) > 1:
                nearest = max(line, key=lambda resident: found(resident.request))
                if can_start(nearest):
                    return nearest
        return first if can_start(first) else None

    def start(self, resident: Resident) -> None:
        """It starts: it leaves the line, and has overtaken the requests before it."""
        line = self._lines[resident.who]
        for other in islice(line, line.index(resident)):
            other.overtaken += 1
        self.leave(resident)
