"""Pacing: the length of prefill chunks while answers are under way.

Pure: seconds of steps in, sizes of chunks out. Chunks and decode steps alternate, or share steps
where all shards can, so a chunk's time delays every answer. A chunk gets the time of one decode
step, or more if more requests wait for their first token than for their next, so that all waiting
counts alike.

Step times are observed, not predicted: they depend on the plan, the context and other load. If a
larger chunk takes hardly longer, for example because steps wait for a network, it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.scheduling.fairness import WEIGHTS, Who

FEWEST_TOKENS = 4
"""Fewer take as long: their steps read all weights, too."""

_NEWEST = 0.3
"""Weight of the newest step in the moving average."""
_MOST_SLOWER = 2.0
"""A step slower than this multiple of the average is an outlier."""
_HARDLY_LONGER, _SOMEWHAT_LONGER = 1.1, 1.25
"""Relative to the next smaller chunk, and to the smallest."""
_MOST_MIXED = 32
"""Steps with a chunk between two without, which show how long the answers take alone."""
_LEAST_SHARE = 0.05
"""Least time of a chunk in a step with answers, relative to a step of these alone."""
_PATIENCE = 24
"""Chunks before a larger one is tried again: this delays fewer than one token in twenty."""


def time_of_prompts(reading: Sequence[Who], answering: Sequence[Who]) -> float:
    """Seconds for chunks, for each second of decode steps.

    reading: the clients of prompts being read; answering: those of answers under way, at least one.
    Each priority gets a part of the time by its weight, each client in it an equal part, and each
    of its requests an equal part of that. At least 1: prompts never get less than all answers
    together, unless all prompts have a lower priority.
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
    """Observes step times and decides the next chunk's length."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._chunks_s: dict[int, float] = {}
        """Seconds by number of tokens."""
        self._size: int | None = None
        self._is_new = False
        """Whether it was observed since it was last used."""
        self._patience = 0

    def decoded(self, seconds: float) -> None:
        """Record a decode step, in which each answer got a token."""
        self._decode_s = _mean(self._decode_s, seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Record a chunk."""
        self._chunks_s[tokens] = _mean(self._chunks_s.get(tokens), seconds)
        self._is_new |= tokens == self._size

    def has_tried(self, tokens: int) -> bool:
        """Whether it is known how long a chunk of so many tokens takes."""
        return tokens in self._chunks_s

    def chunk_tokens(self, most: int, *, answers: int, times: float) -> int:
        """Tokens of the next chunk, at most `most`.

        answers: those that get a token in each step between chunks. A chunk may take `times` as
        long as such a step.
        """
        if self._size is None:
            # A chunk of as many rows takes about as long.
            self._size = _rounded(max(answers, FEWEST_TOKENS) * times)
        elif self._decode_s is not None and self._is_new:
            self._adapt(self._size, times * self._decode_s, most)
        self._is_new = False
        if self._size > most:
            self._size = _rounded(most)
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
            self._chunks_s.pop(larger, None)  # the observation may be old


class MixedPacing:
    """Decides the length of chunks that share a step with tokens of answers.

    Such a step reads the weights once for both. What it takes longer than a step of the answers
    alone is the chunk's time, which is limited as that of a chunk in turn.
    """

    def __init__(self) -> None:
        self._pacing = Pacing()
        self._alone_s = 0.0
        self._answers = 0
        self._steps = 0

    def decoded(self, seconds: float, *, answers: int) -> None:
        """Record a step of these answers alone."""
        is_known = answers == self._answers
        self._alone_s = _mean(self._alone_s if is_known else None, seconds)
        self._answers, self._steps = answers, 0
        self._pacing.decoded(self._alone_s)

    def read(self, tokens: int, seconds: float) -> None:
        """Record a step with a chunk of so many tokens."""
        self._pacing.read(tokens, max(seconds - self._alone_s, _LEAST_SHARE * self._alone_s))
        self._steps += 1

    def knows(self, answers: int) -> bool:
        """Whether it is known how long a step of so many answers takes alone."""
        return answers == self._answers and self._steps < _MOST_MIXED

    def has_tried(self, tokens: int) -> bool:
        """Whether it is known how long a chunk of so many tokens takes."""
        return self._pacing.has_tried(tokens)

    def chunk_tokens(self, most: int, *, answers: int, times: float) -> int:
        """See `Pacing.chunk_tokens`."""
        return self._pacing.chunk_tokens(most, answers=answers, times=times)


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
    """The largest power of two up to it, or 1.5 times one: back ends prepare for each size."""
    size = FEWEST_TOKENS
    while _larger(size) <= tokens and size < 1 << 20:
        size = _larger(size)
    return size
