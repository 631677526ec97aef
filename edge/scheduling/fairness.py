"""Fair queueing: weighted by priority, and equal between the clients of a priority.

Pure. Each priority, and each client in it, has a counter of its tokens; those of priorities are
divided by their weight. The least counter is served next. A newcomer starts at the least counter of
the others, or at the last one if there are none: idle time earns no credit, and unwanted service
makes no debt. So no client starves, however many requests others have. After "Fairness in Serving
Large Language Models" (Sheng et al., 2024), where these are virtual token counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The order in which ties are broken."""

WEIGHTS: Mapping[Priority, int] = {"high": 16, "normal": 4, "low": 1}
"""Proportions of tokens while requests of several priorities wait."""

ANSWER_WEIGHT = 2
"""Weight of an answer's token relative to a prompt's: it takes longer to compute."""

_MOST_REMEMBERED = 1024
"""Idle clients whose counters are kept."""

Name = TypeVar("Name", bound=str)


class Who(NamedTuple):
    """The client and the priority of a request."""

    client: str = ""
    priority: Priority = "normal"


ANYBODY = Who()


class FairShares:
    """Counters of priorities, and of clients in each. Call `come` and `go` once for each
    request."""

    def __init__(self) -> None:
        self._priorities: _Counters[Priority] = _Counters()
        self._clients: dict[Priority, _Counters[str]] = {each: _Counters() for each in PRIORITIES}

    def come(self, who: Who) -> None:
        """A request has arrived."""
        self._priorities.come(who.priority)
        self._clients[who.priority].come(who.client)

    def go(self, who: Who) -> None:
        """A request has ended."""
        self._priorities.go(who.priority)
        self._clients[who.priority].go(who.client)

    def give(self, who: Who, tokens: int) -> None:
        """Count tokens of a prompt; those of an answer count `ANSWER_WEIGHT` times. The client must
        have a request."""
        self._priorities.give(who.priority, tokens / WEIGHTS[who.priority])
        self._clients[who.priority].give(who.client, tokens)

    def first(self, waiting: Iterable[Who]) -> Who:
        """The next of these to be served; the first of equals."""
        clients: dict[Priority, list[str]] = {}
        for who in waiting:
            clients.setdefault(who.priority, []).append(who.client)
        priority = self._priorities.first(each for each in PRIORITIES if each in clients)
        return Who(self._clients[priority].first(clients[priority]), priority)


class _Counters(Generic[Name]):
    """Counters by name. Call `come` and `go` once for each request of a name."""

    def __init__(self) -> None:
        self._given: dict[Name, float] = {}
        """Ordered by the last `come` or `go`."""
        self._requests: Counter[Name] = Counter()
        self._last = 0.0
        """Counter of the last active name, used when no name is active."""

    def come(self, name: Name) -> None:
        """A request of this name has arrived."""
        if not self._requests[name]:
            least = min(map(self._given.__getitem__, self._requests), default=self._last)
            self._given[name] = max(self._given.pop(name, 0.0), least)
        self._requests[name] += 1

    def go(self, name: Name) -> None:
        """A request of this name has ended."""
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name]
            self._given[name] = self._last = self._given.pop(name)
            idle = [each for each in self._given if each not in self._requests]
            for each in idle[: max(0, len(idle) - _MOST_REMEMBERED)]:
                del self._given[each]

    def give(self, name: Name, amount: float) -> None:
        self._given[name] += amount

    def first(self, names: Iterable[Name]) -> Name:
        return min(names, key=lambda name: self._given.get(name, 0.0))
