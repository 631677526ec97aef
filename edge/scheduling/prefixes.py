"""Beginnings that need not be computed again: what requests left in memory, found by their tokens.

Pure. What a row of keys and values is, to the last bit, depends on the step that computed it: one
token alone takes another way through attention than several at once. A prompt is computed in steps
of several tokens, an answer token by token. Who goes on from an answer is given its rows as they
are, like whoever computes everything anew in the same steps: so each cache knows which of its
tokens were computed singly. Where no bit may depend on what was found, no answer is of use, and
the next turn of a conversation computes it as a part of its prompt.

Where a row depends on how many others are in its step, too, whole chunks of a prompt are of use
only: then the unit is a chunk, else two tokens, because products take rows in pairs and round a
last one alone in another way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.memory.recomputing import effort
from edge.protocol.step import SHORTEST_STEP

FEWEST_TOKENS = 16
"""Fewer are computed as fast as they are asked for."""

Span = tuple[int, int]
"""A range of tokens: the first, and the one behind the last."""

Spans = tuple[Span, ...]
"""In order, and apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A cache that begins with the same tokens as a prompt."""

    request: str
    """Whose."""
    tokens: int
    """Number of tokens in common that are of use."""
    singly: Spans
    """Those of these tokens that were computed one at a time."""
    is_whole: bool
    """There is no more to it: who goes on from it has all of it."""


@dataclass(slots=True, kw_only=True)
class _Cache:
    tokens: NDArray[np.int64]
    singly: Spans
    salt: str
    order: bytes
    """Sorts as its salt and then its tokens do: who has most of them in common lies next to it."""


class PrefixCacheIndex:
    """The caches of requests that are over. The owner decides which ones go.

    Who has another salt has nothing in common: how soon a prompt is read would tell of others'.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        fewest_tokens: int = FEWEST_TOKENS,
        is_strict: bool = False,
        last_saved: Callable[[str, int], int] | None = None,
    ) -> None:
        """is_strict: no bit may depend on what is found. last_saved: where layers have states, how
        many of these first tokens of a request there is one of; None: it may be cut anywhere."""
        self.unit_tokens = chunk_tokens
        """What is of use of a prompt is a multiple of it: a chunk, or 2 where a chunk may be cut
        behind any two tokens."""
        self.fewest_tokens = fewest_tokens
        """Beginnings that are shorter are of no use."""
        self._is_strict = is_strict
        self._last_saved = last_saved
        self._caches: dict[str, _Cache] = {}
        self._sorted: list[str] = []
        """All of them, by their tokens."""
        self._common: list[int] = []
        """For each of these, how many tokens it has in common with the one before it."""

    def __contains__(self, request: str) -> bool:
        return request in self._caches

    def worth_keeping(self, tokens: int, singly: Spans) -> int:
        """How many of a cache's tokens may be of use; 0 for too few."""
        kept = min([tokens, *(first for first, _last in singly)]) if self._is_strict else tokens
        return kept if kept >= self.fewest_tokens else 0

    def keep(self, request: str, tokens: Sequence[int], singly: Spans = (), salt: str = "") -> None:
        """A request is over. `tokens`: those that it has keys and values of."""
        if request in self._caches:
            self.drop(request)
        held = np.asarray(tokens, np.int64)
        order = f"{salt}\0".encode() + held.astype(">i8").tobytes()
        cache = _Cache(tokens=held, singly=singly, salt=salt, order=order)
        self._caches[request] = cache
        place = bisect_left(self._sorted, cache.order, key=self._order)
        self._sorted.insert(place, request)
        self._common.insert(place, self._common_at(place))
        if place + 1 < len(self._sorted):
            self._common[place + 1] = self._common_at(place + 1)

    def drop(self, request: str) -> None:
        place = self._place(request)
        common = self._common.pop(place)
        if place < len(self._common):  # what three have in common is the least of what two have
            self._common[place] = min(self._common[place], common)
        self._sorted.pop(place)
        del self._caches[request]

    def find(self, prompt: Sequence[int], salt: str = "") -> Found | None:
        """The cache that saves most of this prompt."""
        wanted = np.asarray(prompt, np.int64)
        best: Found | None = None
        for request, cache in self._caches.items():
            if cache.salt != salt:
                continue
            common = common_tokens(wanted, cache.tokens)
            tokens = self.useful(common, len(prompt), cache.singly, of=request)
            if tokens > (best.tokens if best is not None else 0):
                best = Found(
                    request=request,
                    tokens=tokens,
                    singly=cut(cache.singly, tokens),
                    is_whole=common == len(cache.tokens),
                )
        return best

    def cost(self, request: str, among: Container[str]) -> float:
        """Cost of computing a cache again while those of `among` are there, as the number of tokens
        at the beginning of a prompt that would take as long."""
        place = self._place(request)
        before = self._shared(range(place, 0, -1), among, -1)
        behind = self._shared(range(place + 1, len(self._sorted)), among, 0)
        return effort(len(self._caches[request].tokens)) - effort(max(before, behind))

    def _shared(self, places: range, among: Container[str], beside: int) -> int:
        """Tokens in common with the first of `among` in one direction, by what neighbours have."""
        if not places:
            return 0
        shared = self._common[places[0]]
        for at in places:
            shared = min(shared, self._common[at])
            if self._sorted[at + beside] in among:
                return shared
        return 0

    def _common_at(self, place: int) -> int:
        if place == 0:
            return 0
        one, other = (self._caches[each] for each in self._sorted[place - 1 : place + 1])
        return common_tokens(one.tokens, other.tokens) if one.salt == other.salt else 0

    def _place(self, request: str) -> int:
        """In the order; those with the same tokens lie side by side."""
        place = bisect_left(self._sorted, self._order(request), key=self._order)
        return self._sorted.index(request, place)

    def _order(self, request: str) -> bytes:
        return self._caches[request].order

    def useful(self, common: int, prompt_tokens: int, singly: Spans = (), *, of: str = "") -> int:
        """How many of the tokens that a prompt has in common with a cache are not computed.

        of: whose cache it is.
        """
        found = self.whole_units(min(common, prompt_tokens - SHORTEST_STEP), singly)
        if self._last_saved is not None:
            found = self._last_saved(of, found)
        return found if found >= self.fewest_tokens else 0

    def common(self, prompt: NDArray[np.int64], salt: str = "") -> list[int]:
        """Tokens that it and each cache begin with."""
        alike = (cache for cache in self._caches.values() if cache.salt == salt)
        return [common_tokens(prompt, cache.tokens) for cache in alike]

    def whole_units(self, tokens: int, singly: Spans) -> int:
        """As many of a request's first tokens as are of use by how they were computed."""
        begin = 0
        for first, last in singly:
            if tokens <= first:
                break
            if self._is_strict:
                tokens = first
                break
            if tokens <= last:
                return tokens  # an answer may be cut anywhere
            begin = last
        return begin + (tokens - begin) // self.unit_tokens * self.unit_tokens


def common_tokens(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens that both begin with."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(one[:count] != other[:count])
    return int(unlike[0]) if unlike.size else count


def cut(spans: Spans, tokens: int) -> Spans:
    """What lies in the first N tokens."""
    return tuple((first, min(last, tokens)) for first, last in spans if first < tokens)


def joined(spans: Spans, another: Span) -> Spans:
    """With one more, which may begin or end where they do."""
    together: list[Span] = []
    for first, last in sorted((*spans, another)):
        if together and together[-1][1] == first:
            together[-1] = (together[-1][0], last)
        else:
            together.append((first, last))
    return tuple(together)


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
