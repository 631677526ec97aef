"""How long a chunk of a prompt may be while answers are under way.

Pure: seconds of steps in, sizes of chunks out. Chunks and tokens of answers take turns, so what a
chunk takes is what everybody who reads an answer waits longer. A chunk gets the time of one token,
or more where more requests of a client wait for their first token than for their next: whoever
waits counts alike.

What steps take is observed, not predicted: it depends on the plan, on how long the prompts are by
now, and on what else the devices do. Where a larger chunk takes hardly longer, as where every step
waits for a network, it is taken all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.scheduling.fairness import WEIGHTS, Who

FEWEST_TOKENS = 4
"""Fewer take as long: the weights are read for them, too."""

_NEWEST = 0.3
"""What the last step counts of what steps are said to take."""
_MOST_SLOWER = 2.0
"""A step that takes longer by more than this is taken for one that was held up."""
_HARDLY_LONGER, _SOMEWHAT_LONGER = 1.1, 1.25
"""Than the next smaller chunk, and than the smallest."""
_PATIENCE = 24
"""Chunks before a larger one is tried again: fewer than one token in twenty waits for that."""


def time_of_prompts(reading: Sequence[Who], answering: Sequence[Who]) -> float:
    """Seconds that chunks may take for each second that tokens of answers take.

    Who asked for the prompts that are read, and for the answers under way; there are some. Each
    priority has a part of the time by its weight, in it each client an equal one, and in that each
    of its requests. At least 1: prompts never get less than all answers together, unless all of
    them are of lower priority.
    """
    everybody = {*reading, *answering}
    parts = weights = 0.0
    for priority, weight in WEIGHTS.items():
        clients = [who for who in everybody if who.priority == priority]
        if clients:
            of_prompts = [
                reading.count(who) / (reading.count(who) + answering.count(who)) for who in clients
            ]
            parts += weight * sum(of_prompts) / len(clients)
            weights += weight
    part = parts / weights
    least = min(1.0, _most_weight(reading) / _most_weight(answering))
    return max(least, part / (1 - part))


def _most_weight(of: Sequence[Who]) -> int:
    return max(WEIGHTS[who.priority] for who in of)


class Pacing:
    """Observes steps, and says how long the next chunk may be."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._chunks_s: dict[int, float] = {}
        """By their tokens."""
        self._size: int | None = None
        self._is_new = False
        """It was observed since it was looked at last."""
        self._patience = 0

    def decoded(self, seconds: float) -> None:
        """A step took so long in which each answer got a token."""
        self._decode_s = _mean(self._decode_s, seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """A chunk took so long."""
        self._chunks_s[tokens] = _mean(self._chunks_s.get(tokens), seconds)
        self._is_new |= tokens == self._size

    def chunk_tokens(self, most: int, *, answers: int, times: float) -> int:
        """Tokens of the next chunk, at most `most`.

        answers: number of them that get a token in each step between chunks; a chunk may take
        `times` as long as such a step.
        """
        if self._size is None:
            # As many rows take about as long.
            self._size = _rounded(max(answers, FEWEST_TOKENS) * times)
        elif self._decode_s is not None and self._is_new:
            self._adapt(self._size, times * self._decode_s, most)
        self._is_new = False
        return min(most, self._size)

    def _adapt(self, size: int, limit_s: float, most: int) -> None:
        chunk_s, smaller, larger = self._chunks_s[size], _smaller(size), _larger(size)
        bearable_s = max(limit_s, _SOMEWHAT_LONGER * min(self._chunks_s.values()))
        hardly_s = _HARDLY_LONGER * self._chunks_s.get(smaller, 0.0)
        if chunk_s > max(limit_s, min(hardly_s, bearable_s)):
            fitting = _rounded(size * limit_s / chunk_s)
            self._size = min(smaller, max(fitting, size // 2))
            self._patience = _PATIENCE
            return
        self._patience -= 1
        if larger <= most and (self._patience <= 0 or chunk_s * larger / size <= limit_s):
            self._size = larger
            self._chunks_s.pop(larger, None)  # it may be long ago


def _mean(before: float | None, now: float) -> float:
    if before is None:
        return now
    return before + _NEWEST * (min(now, _MOST_SLOWER * before) - before)


def _larger(size: int) -> int:
    return size + size // 2 if size.bit_count() == 1 else size // 3 * 4


def _smaller(size: int) -> int:
    if size <= FEWEST_TOKENS:
        return FEWEST_TOKENS
    return size // 4 * 3 if size.bit_count() == 1 else size // 3 * 2


def _rounded(tokens: float) -> int:
    """The largest power of two up to it, or one and a half times one: back ends prepare for each
    size that they see."""
    size = FEWEST_TOKENS
    while _larger(size) <= tokens and size < 1 << 20:
        size = _larger(size)
    return size
