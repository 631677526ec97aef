"""How many are served at once, and how many more may wait: the others are told to come again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from edge.server.refusals import Refusal


class Gate:
    """Counts answers that are under way or wait in the scheduler."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.inside = 0
        self.is_draining = False
        """The server ends: nobody new is let in."""

    @contextlib.asynccontextmanager
    async def entered(self, answers: int) -> AsyncIterator[None]:
        """Raises Refusal where there is no room for so many answers."""
        if self.is_draining:
            raise Refusal(503, "this server is about to end; ask another one")
        if self.inside + answers > self._most:
            raise Refusal(
                429,
                f"{self.inside} answers are under way or wait, and {self._most} are the most at "
                "once; try again soon",
                code="rate_limit_exceeded",
            )
        self.inside += answers
        try:
            yield
        finally:
            self.inside -= answers
