"""Who of the clients is served next: the one that was given least.

Pure. Each client has a counter of the tokens it was given. One that comes anew starts where the
least served of the others is: it has no claim to what it did not ask for, and no debt of others'
making. So none starves, however much others ask for. As in "Fairness in Serving Large Language
Models" (Sheng et al., 2024), where the counters are called virtual token counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ANSWER_WEIGHT = 2
"""What a token of an answer counts, where one of a prompt counts 1: it takes longer to compute."""

_MOST_REMEMBERED = 1024
"""Clients that have nothing under way, and whose counters are kept."""


class Shares:
    """Counters by client. `come` and `go` for each request of theirs."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        """The one that came or went last is the last."""
        self._requests: Counter[str] = Counter()

    def come(self, client: str) -> None:
        """A request of the client waits from now on, or is served."""
        if not self._requests[client]:
            least = min((self._given[each] for each in self._requests if each != client), default=0)
            self._given[client] = max(self._given.pop(client, 0), least)
        self._requests[client] += 1

    def go(self, client: str) -> None:
        """A request of the client is over."""
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
            self._given[client] = self._given.pop(client)
            idle = [each for each in self._given if each not in self._requests]
            for each in idle[: max(0, len(idle) - _MOST_REMEMBERED)]:
                del self._given[each]

    def give(self, client: str, tokens: int) -> None:
        """Tokens of a prompt; those of an answer count `ANSWER_WEIGHT` times. Only of one that has
        a request."""
        self._given[client] += tokens

    def first(self, clients: Iterable[str]) -> str:
        """Of these, who is next; of several that were given as much the first."""
        return min(clients, key=lambda client: self._given.get(client, 0))
