"""Beginnings that need not be computed again: what requests left in memory, found by their tokens.

Pure. A reply must be the same whether its beginning was found or computed. What a row of keys and
values is, to the last bit, depends on the step that computed it: one token alone takes another way
through attention than several at once. So a cache is of use as far as it was computed in steps of
several tokens, as a prompt is: first of all the prompt it was made for. The answer follows when
nothing else is to do: its tokens are computed once more, as a part of the prompt of who goes on
from them (`Rework`).

Where a row depends on how many others are in its step, too, whole chunks of a prompt are of use
only: then the unit is a chunk, else two tokens, because products take rows in pairs and round a
last one alone in another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.protocol.step import SHORTEST_STEP

FEWEST_TOKENS = 16
"""Fewer are computed as fast as they are asked for."""

ATTENTION_TOKENS = 4000
"""A token behind so many takes twice as long as one behind none. Measured with 6 layers of 1024 on
a CPU: prompts of 1,000 and 16,000 tokens were read at 1,382 and 473 tok/s."""

REWORK_TOKENS = 64
"""Of an answer, in one step: who comes meanwhile waits no longer than for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A cache that begins with the same tokens as a prompt."""

    request: str
    """Whose."""
    tokens: int
    """So many of them, and of use."""
    is_whole: bool
    """There is no more to it: who goes on from it has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rework:
    """Tokens of a kept cache that are computed once more, as a prompt is."""

    request: str
    position: int
    tokens: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Cache:
    tokens: NDArray[np.int64]
    usable: int
    """Tokens at its beginning that were computed as a prompt is."""
    goes_on: bool
    """Somebody will come who begins with all of them."""


class Beginnings:
    """The caches of requests that are over. The owner decides which ones go."""

    def __init__(self, *, chunk_tokens: int, fewest_tokens: int = FEWEST_TOKENS) -> None:
        self.unit_tokens = chunk_tokens
        """What is of use is a multiple of it: a chunk, or 2 where a chunk may be cut behind any two
        tokens."""
        self._chunk = chunk_tokens
        self.fewest_tokens = fewest_tokens
        """Beginnings that are shorter are of no use."""
        self._caches: dict[str, _Cache] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._caches

    def keep(
        self, request: str, tokens: Sequence[int], *, computed_as_prompt: int, goes_on: bool
    ) -> None:
        """A request is over. `tokens`: of its prompt and answer, those that memory is kept for."""
        self._caches[request] = _Cache(
            tokens=np.asarray(tokens, np.int64),
            usable=self._whole_units(computed_as_prompt),
            goes_on=goes_on,
        )

    def drop(self, request: str) -> None:
        del self._caches[request]

    def find(self, prompt: Sequence[int]) -> Found | None:
        """The cache that saves most of this prompt."""
        wanted = np.asarray(prompt, np.int64)
        best: Found | None = None
        for request, cache in self._caches.items():
            common = common_tokens(wanted, cache.tokens)
            tokens = self.useful(min(common, cache.usable), len(prompt))
            if tokens > (best.tokens if best is not None else 0):
                best = Found(request=request, tokens=tokens, is_whole=common == len(cache.tokens))
        return best

    def cost(self, request: str, among: Iterable[str]) -> float:
        """Of computing a cache again, while these are there, as many tokens at the beginning of a
        prompt would take."""
        cache = self._caches[request]
        others = (self._caches[each] for each in among if each != request)
        shared = max(
            (min(common_tokens(cache.tokens, each.tokens), each.usable) for each in others),
            default=0,
        )
        return _cost(max(cache.usable, len(cache.tokens) * cache.goes_on)) - _cost(shared)

    def useful(self, common: int, prompt_tokens: int) -> int:
        """How many of the tokens that a prompt has in common with a cache are not computed."""
        found = self._whole_units(min(common, prompt_tokens - SHORTEST_STEP))
        return found if found >= self.fewest_tokens else 0

    def rework(self, among: Iterable[str]) -> Rework | None:
        """What is to be computed once more, of the first of these caches that has some."""
        for request in among:
            cache = self._caches[request]
            left = self._whole_units(len(cache.tokens)) - cache.usable
            if not cache.goes_on or left < 1:
                continue
            size = self.unit_tokens
            if size < self._chunk:
                size = next_chunk(left, min(self._chunk, REWORK_TOKENS))
            last = cache.usable + size
            first = max(0, min(cache.usable, last - SHORTEST_STEP))
            cache.usable = last
            return Rework(
                request=request, position=first, tokens=tuple(cache.tokens[first:last].tolist())
            )
        return None

    def _whole_units(self, tokens: int) -> int:
        return tokens // self.unit_tokens * self.unit_tokens


def _cost(tokens: int) -> float:
    return tokens + tokens**2 / (2 * ATTENTION_TOKENS)


def common_tokens(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens that both begin with."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(one[:count] != other[:count])
    return int(unlike[0]) if unlike.size else count


def next_chunk(tokens: int, most: int) -> int:
    """How many of a prompt's tokens its next step takes.

    No token is left alone, if it can be, and only a prompt's end has an odd number of them: so
    each token has the same row however the prompt is cut. tokens: that are left; most: tokens of a
    step.
    """
    if tokens <= most or most < SHORTEST_STEP:
        return min(tokens, most)
    size = most - most % 2
    return size - 2 if tokens - size == 1 and size > SHORTEST_STEP else size
