"""Who is served next: of the priorities the one that was given least for its weight, and of its
clients the one that was given least.

Pure. Each priority, and each client in it, has a counter of what it was given. One that comes anew
starts where the least served of the others is, or the last of them was: it has no claim to what it
did not ask for, and no debt for what nobody else wanted. So none starves, however much others ask
for, and however high their priority. As in "Fairness in Serving Large Language Models" (Sheng et
al., 2024), where the counters are called virtual token counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The first is served first, where all were given alike."""

WEIGHTS: Mapping[Priority, int] = {"high": 16, "normal": 4, "low": 1}
"""While requests of several priorities wait, tokens are given to them in this proportion."""

ANSWER_WEIGHT = 2
"""What a token of an answer counts, where one of a prompt counts 1: it takes longer to compute."""

_MOST_REMEMBERED = 1024
"""Clients that have nothing under way, and whose counters are kept."""

Name = TypeVar("Name", bound=str)


class Who(NamedTuple):
    """Who asks, and how urgently."""

    client: str = ""
    priority: Priority = "normal"


ANYBODY = Who()


class FairShares:
    """Counters of priorities, and of clients in each. `come` and `go` for each request."""

    def __init__(self) -> None:
        self._priorities: _Counters[Priority] = _Counters()
        self._clients: dict[Priority, _Counters[str]] = {each: _Counters() for each in PRIORITIES}

    def come(self, who: Who) -> None:
        """A request waits from now on, or is served."""
        self._priorities.come(who.priority)
        self._clients[who.priority].come(who.client)

    def go(self, who: Who) -> None:
        """A request is over."""
        self._priorities.go(who.priority)
        self._clients[who.priority].go(who.client)

    def give(self, who: Who, tokens: int) -> None:
        """Tokens of a prompt; those of an answer count `ANSWER_WEIGHT` times. Only of one that has
        a request."""
        self._priorities.give(who.priority, tokens / WEIGHTS[who.priority])
        self._clients[who.priority].give(who.client, tokens)

    def first(self, waiting: Iterable[Who]) -> Who:
        """The next of these to be served; of several that were given as much the first."""
        clients: dict[Priority, list[str]] = {}
        for who in waiting:
            clients.setdefault(who.priority, []).append(who.client)
        priority = self._priorities.first(each for each in PRIORITIES if each in clients)
        return Who(self._clients[priority].first(clients[priority]), priority)


class _Counters(Generic[Name]):
    """By name of whoever has requests. `come` and `go` for each request of theirs."""

    def __init__(self) -> None:
        self._given: dict[Name, float] = {}
        """The one that came or went last is the last."""
        self._requests: Counter[Name] = Counter()
        self._last = 0.0
        """What the last one had that had requests, when none has any."""

    def come(self, name: Name) -> None:
        """A request of it waits from now on, or is served."""
        if not self._requests[name]:
            least = min(map(self._given.__getitem__, self._requests), default=self._last)
            self._given[name] = max(self._given.pop(name, 0.0), least)
        self._requests[name] += 1

    def go(self, name: Name) -> None:
        """A request of it is over."""
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
