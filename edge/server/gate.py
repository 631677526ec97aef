"""Admission control: most answers under way or waiting, in all and for each client."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from edge.server.keys import Caller
from edge.server.refusals import Refusal


def has_room(inside: Mapping[str, int], client: str, answers: int, *, most: int) -> bool:
    """Whether a client may have `answers` more answers. inside: answers of each client so far.

    Once three quarters of the places are taken, no client gets more than an equal part. A client
    without answers gets one place even if all are taken, of a quarter more that are reserved.
    """
    total, own = sum(inside.values()) + answers, inside.get(client, 0) + answers
    if own == answers and total > most:
        return answers == 1 and total <= most + max(1, most // 4)
    part = most // len({*inside, client})
    return total <= most and (own <= part or 4 * total <= 3 * most)


class Gate:
    """Counts answers that are under way or wait in the scheduler, for each client."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: Counter[str] = Counter()
        self.is_draining = False
        """The server shuts down and lets no new answers in."""

    @property
    def inside(self) -> int:
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def entered(self, answers: int, caller: Caller) -> AsyncIterator[None]:
        """Count `answers` more answers of the client. Raises Refusal if there is no room."""
        client = caller.name
        if self.is_draining:
            raise Refusal(503, "this server is shutting down; use another one")
        own = self._inside[client]
        if caller.most_answers is not None and own + answers > caller.most_answers:
            raise Refusal(
                429,
                f"this key has {own} answers under way or waiting and may have at most "
                f"{caller.most_answers} at once; try again soon",
                code="rate_limit_exceeded",
            )
        if not has_room(self._inside, client, answers, most=self._most):
            raise Refusal(
                429,
                f"{self.inside} answers are under way or waiting, {own} of them yours, and this "
                f"server takes {self._most} at once; try again soon",
                code="rate_limit_exceeded",
            )
        self._inside[client] += answers
        try:
            yield
        finally:
            self._inside[client] -= answers
            if not self._inside[client]:
                del self._inside[client]
