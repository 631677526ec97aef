"""Which step comes next. Pure: integers in, steps out; knows no peers, text or time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edge.backends.base import Step


@dataclass(slots=True)
class _Entry:
    request: str
    tokens: list[int]
    longest: int
    all_logits: bool
    computed: int = 0


class Scheduler:
    """Turns requests into steps: prompts in chunks, then one token at a time.

    Requests that run take turns, so a long prompt does not hold up the tokens of another reply. A
    chunk may be handed out before the one before it is done: that is what keeps all pipeline stages
    busy. But only `max_steps_out` steps are out at once: what is handed out cannot be taken back
    when a request is cancelled, nor be overtaken by another.

    A request starts once its longest context fits beside those of the requests that run; until then
    it waits its turn, first come, first served.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        logit_chunk_tokens: int,
        capacity_tokens: int,
        max_steps_out: int,
    ) -> None:
        """`capacity_tokens` is what the KV caches have room for, over all requests."""
        self._chunk_tokens = chunk_tokens
        self._logit_chunk_tokens = logit_chunk_tokens
        self._capacity_tokens = self._free_tokens = capacity_tokens
        self._max_steps_out = max_steps_out
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, _Entry] = {}
        self._turns: deque[str] = deque()
        self._out: deque[Step] = deque()

    @property
    def steps_out(self) -> int:
        """How many steps were handed out and not yet answered."""
        return len(self._out)

    def add(
        self, request: str, tokens: list[int], *, new_tokens: int = 0, all_logits: bool = False
    ) -> None:
        """A request that may grow by `new_tokens`.

        With `all_logits` every row is wanted and no token follows. Raises ValueError for a request
        that could never start.
        """
        if not tokens or request in self._waiting or request in self._running:
            raise ValueError("a request needs tokens and an id of its own")
        longest = len(tokens) + new_tokens
        if longest > self._capacity_tokens:
            raise ValueError(f"{longest} tokens never fit into {self._capacity_tokens}")
        self._waiting[request] = _Entry(request, list(tokens), longest, all_logits)

    def cancel(self, request: str) -> None:
        """Forget a request and give its room to others; unknown ones are ignored.

        Steps of it that are out are still to be answered.
        """
        self._waiting.pop(request, None)
        entry = self._running.pop(request, None)
        if entry is not None:
            self._free_tokens += entry.longest

    def next_step(self) -> Step | None:
        """The next chunk of the next request that has tokens to compute; None while all wait."""
        self._start_waiting()
        while self._turns and len(self._out) < self._max_steps_out:
            entry = self._running.get(self._turns.popleft())
            if entry is None:
                continue
            size = self._logit_chunk_tokens if entry.all_logits else self._chunk_tokens
            start = entry.computed
            chunk = tuple(entry.tokens[start : start + size])
            entry.computed += len(chunk)
            ends = entry.computed == len(entry.tokens)
            if not ends:
                self._turns.append(entry.request)
            step = Step(
                request=entry.request,
                position=start,
                tokens=chunk,
                logit_rows=len(chunk) if entry.all_logits else int(ends),
            )
            self._out.append(step)
            return step
        return None

    def answered(self, request: str, position: int) -> Step:
        """Note that the oldest step that was out is done; `position` is the one after it.

        Steps are answered in the order they were handed out: raises ValueError for any other.
        """
        if not self._out:
            raise ValueError("an answer to no step")
        step = self._out[0]
        if (request, position) != (step.request, step.position + step.num_tokens):
            raise ValueError(
                f"an answer for position {position} where {step.position + step.num_tokens} of "
                "the oldest step was due"
            )
        return self._out.popleft()

    def commit(self, request: str, token: int) -> None:
        """A step's sampled token; it is what the request computes next."""
        entry = self._running.get(request)
        if entry is not None:
            entry.tokens.append(token)
            self._turns.append(request)

    def _start_waiting(self) -> None:
        while self._waiting:
            request, entry = next(iter(self._waiting.items()))
            if entry.longest > self._free_tokens:
                return
            del self._waiting[request]
            self._free_tokens -= entry.longest
            self._running[request] = entry
            self._turns.append(request)
