"""Which step comes next. Pure: integers in, steps out; knows no peers, text or time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edge.backends.base import Step


@dataclass(slots=True)
class _Entry:
    request: str
    tokens: list[int]
    all_logits: bool
    computed: int = 0


class Scheduler:
    """Turns requests into steps: prompts in chunks, then one token at a time.

    Requests take turns, so a long prompt does not hold up the tokens of another reply. A chunk may
    be handed out before the one before it is done: that is what keeps all pipeline stages busy.
    """

    def __init__(self, *, chunk_tokens: int, logit_chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._logit_chunk_tokens = logit_chunk_tokens
        self._entries: dict[str, _Entry] = {}
        self._turns: deque[str] = deque()

    def add(self, request: str, tokens: list[int], *, all_logits: bool = False) -> None:
        """Start a request. With `all_logits` every row is wanted and no token follows."""
        if not tokens or request in self._entries:
            raise ValueError("a request needs tokens and an id of its own")
        self._entries[request] = _Entry(request, list(tokens), all_logits)
        self._turns.append(request)

    def cancel(self, request: str) -> None:
        """Forget a request; unknown ones are ignored."""
        self._entries.pop(request, None)

    def next_step(self) -> Step | None:
        """The next chunk of the next request that has tokens to compute; None while all wait."""
        while self._turns:
            entry = self._entries.get(self._turns.popleft())
            if entry is None:
                continue
            size = self._logit_chunk_tokens if entry.all_logits else self._chunk_tokens
            start = entry.computed
            chunk = tuple(entry.tokens[start : start + size])
            entry.computed += len(chunk)
            ends = entry.computed == len(entry.tokens)
            if not ends:
                self._turns.append(entry.request)
            return Step(
                request=entry.request,
                position=start,
                tokens=chunk,
                logit_rows=len(chunk) if entry.all_logits else int(ends),
            )
        return None

    def commit(self, request: str, token: int) -> None:
        """A step's sampled token; it is what the request computes next."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.tokens.append(token)
            self._turns.append(request)
