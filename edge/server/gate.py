"""How many are served at once, and how many more may wait: the others are told to come again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from edge.server.keys import Caller
from edge.server.refusals import Refusal


def has_room(inside: Mapping[str, int], client: str, answers: int, *, most: int) -> bool:
    """Whether a client may have `answers` more answers, where these have some under way or waiting.

    While three quarters of the places are taken, no client takes more than an equal part of all.
    One that has none finds a place when all are taken, too: there are a quarter more for those.
    """
    total, own = sum(inside.values()) + answers, inside.get(client, 0) + answers
    if own == answers and total > most:
        return answers == 1 and total <= most + max(1, most // 4)
    part = most // len({*inside, client})
    return total <= most and (own <= part or 4 * total <= 3 * most)


class Gate:
    """Counts answers that are under way or wait in the scheduler, by whose they are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: Counter[str] = Counter()
        self.is_draining = False
        """The server ends: nobody new is let in."""

    @property
    def inside(self) -> int:
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def entered(self, answers: int, caller: Caller) -> AsyncIterator[None]:
        """Raises Refusal where there is no room for `answers` more answers of the client."""
        client = caller.name
        if self.is_draining:
            raise Refusal(503, "this server is about to end; ask another one")
        own = self._inside[client]
        if caller.most_answers is not None and own + answers > caller.most_answers:
            raise Refusal(
                429,
                f"{own} answers of this key are under way or wait, and {caller.most_answers} are "
                "its most at once; try again soon",
                code="rate_limit_exceeded",
            )
        if not has_room(self._inside, client, answers, most=self._most):
            raise Refusal(
                429,
                f"{self.inside} answers are under way or wait, {own} of them "
                f"yours, and {self._most} are the most at once; try again soon",
                code="rate_limit_exceeded",
            )
        self._inside[client] += answers
        try:
            yield
        finally:
            self._inside[client] -= answers
            if not self._inside[client]:
                del self._inside[client]
