"""Replies that are under way together: none can end before the others have begun."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import edge
from tests.support.processes import PATIENCE_S, poll_until


def streams_at_once(
    model: edge.Model, prompts: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[edge.ReplyStream]:
    """A reply of so many tokens to each prompt; the coordinator hears of all before it acts on one.

    Its event loop stands still meanwhile.
    """
    gate = threading.Event()
    model._loop.start(gate.wait)
    try:
        return [
            model.stream(prompt, max_new_tokens=count, ignore_eos=True)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
    finally:
        gate.set()


def replies_at_once(
    model: edge.Model, prompts: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[list[int] | edge.EdgeError]:
    """The tokens of each, or its error."""
    replies: list[list[int] | edge.EdgeError] = []
    for stream in streams_at_once(model, prompts, counts):
        try:
            replies.append([token.token_id for token in stream])
        except edge.EdgeError as error:
            replies.append(error)
    return replies


class EndlessReplies:
    """Replies that threads of this context read all the time; too long to end before it does."""

    def __init__(self, streams: Sequence[edge.ReplyStream]) -> None:
        self.tokens: list[list[int]] = [[] for _ in streams]
        self._streams = streams
        self._came = threading.Condition()
        self._is_over = False
        self._pool = ThreadPoolExecutor(len(streams))

    def await_more(self) -> None:
        """Return once each has gone on by two tokens."""
        with self._came:
            counts = [len(each) + 2 for each in self.tokens]
            assert self._came.wait_for(
                lambda: all(map(operator.ge, map(len, self.tokens), counts)), PATIENCE_S
            )

    def __enter__(self) -> EndlessReplies:
        self._readers = list(map(self._pool.submit, repeat(self._read), self._streams, self.tokens))
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._pool.shutdown()
        assert all(reader.result() for reader in self._readers), "a reply came to its end"

    def _read(self, stream: edge.ReplyStream, into: list[int]) -> bool:
        with stream:
            for token in stream:
                with self._came:
                    into.append(token.token_id)
                    self._came.notify()
                if self._is_over:
                    return True
        return False


def await_steps(model: edge.Model) -> None:
    """Return once each peer has computed tokens since this was called: replies are under way."""
    model.measure()
    left = {(times.stage, times.rank) for times in model.measure()}

    def are_computed() -> bool:
        left.difference_update((t.stage, t.rank) for t in model.measure() if t.decode.steps)
        return not left

    poll_until(are_computed)
