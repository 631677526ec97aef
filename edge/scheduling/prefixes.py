"""Prefix cache index: finished requests' KV caches, found by their tokens.

Pure. The last bits of keys and values depend on the step that computed them: attention treats a
single token differently from several. Prompts are computed in steps of several tokens, answers
token by token. A request that continues from an answer uses its rows as they are, and a
recomputation uses the same steps; so each cache records which tokens were computed singly. In
strict mode, where no bit may depend on cache hits, answers are not reused: the next turn computes
them as a part of its prompt.

If a row also depends on the number of rows in its step, only whole chunks of a prompt are reused.
Otherwise the unit is two tokens, because products take rows in pairs and round a single last one
differently.
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
"""Fewer are recomputed as fast as they are asked for."""

Span = tuple[int, int]
"""A range of tokens: the first, and the end."""

Spans = tuple[Span, ...]
"""Ordered and disjoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A cache with a prefix in common with a prompt."""

    request: str
    """The request that left it."""
    tokens: int
    """Number of useful tokens in common."""
    singly: Spans
    """Those of these tokens that were computed one at a time."""
    is_whole: bool
    """Whether the prompt continues from the entire cache."""


@dataclass(slots=True, kw_only=True)
class _Cache:
    tokens: NDArray[np.int64]
    singly: Spans
    salt: str
    order: bytes
    """Sort key of salt and tokens: the neighbours share the longest prefixes."""


class PrefixCacheIndex:
    """An index of finished requests' caches. Its owner decides on eviction.

    Caches with another salt never match: the time of a hit would reveal them.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        fewest_tokens: int = FEWEST_TOKENS,
        is_strict: bool = False,
        last_saved: Callable[[str, int], int] | None = None,
    ) -> None:
        """is_strict: no bit may depend on cache hits. last_saved: if layers have states, the last
        saved position of a request up to a number of tokens; None: a cache may be cut anywhere."""
        self.unit_tokens = chunk_tokens
        """Useful tokens of a prompt are a multiple of this: a chunk, or 2 if a chunk may be cut
        after any pair."""
        self.fewest_tokens = fewest_tokens
        """Shorter prefixes are useless."""
        self._is_strict = is_strict
        self._last_saved = last_saved
        self._caches: dict[str, _Cache] = {}
        self._sorted: list[str] = []
        """All requests, sorted by tokens."""
        self._common: list[int] = []
        """For each of them, tokens in common with the one before."""

    def __contains__(self, request: str) -> bool:
        return request in self._caches

    def worth_keeping(self, tokens: int, singly: Spans) -> int:
        """Number of a cache's tokens that may be useful; 0 if there are too few."""
        kept = min([tokens, *(first for first, _last in singly)]) if self._is_strict else tokens
        return kept if kept >= self.fewest_tokens else 0

    def keep(self, request: str, tokens: Sequence[int], singly: Spans = (), salt: str = "") -> None:
        """Add a finished request. `tokens`: those in its KV cache."""
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
        if place < len(self._common):  # three neighbours share the least of what two do
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
        """Cost of recomputing a cache while those of `among` stay, as the number of tokens at the
        start of a prompt that would take as long."""
        place = self._place(request)
        before = self._shared(range(place, 0, -1), among, -1)
        behind = self._shared(range(place + 1, len(self._sorted)), among, 0)
        return effort(len(self._caches[request].tokens)) - effort(max(before, behind))

    def _shared(self, places: range, among: Container[str], beside: int) -> int:
        """Tokens in common with the nearest of `among` in one direction."""
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
        """Its place in the order; caches with equal tokens are neighbours."""
        place = bisect_left(self._sorted, self._order(request), key=self._order)
        return self._sorted.index(request, place)

    def _order(self, request: str) -> bytes:
        return self._caches[request].order

    def useful(self, common: int, prompt_tokens: int, singly: Spans = (), *, of: str = "") -> int:
        """Useful tokens of the `common` ones that a prompt shares with a cache.

        of: the request that left the cache.
        """
        found = self.whole_units(min(common, prompt_tokens - SHORTEST_STEP), singly)
        if self._last_saved is not None:
            found = self._last_saved(of, found)
        return found if found >= self.fewest_tokens else 0

    def common(self, prompt: NDArray[np.int64], salt: str = "") -> list[int]:
        """Tokens in common with each cache."""
        alike = (cache for cache in self._caches.values() if cache.salt == salt)
        return [common_tokens(prompt, cache.tokens) for cache in alike]

    def whole_units(self, tokens: int, singly: Spans) -> int:
        """Useful tokens among a request's first `tokens`, by how they were computed."""
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
    """Length of the common prefix."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(one[:count] != other[:count])
    return int(unlike[0]) if unlike.size else count


def cut(spans: Spans, tokens: int) -> Spans:
    """The spans within the first `tokens` tokens."""
    return tuple((first, min(last, tokens)) for first, last in spans if first < tokens)


def joined(spans: Spans, another: Span) -> Spans:
    """The spans with one more, merged where they touch."""
    together: list[Span] = []
    for first, last in sorted((*spans, another)):
        if together and together[-1][1] == first:
            together[-1] = (together[-1][0], last)
        else:
            together.append((first, last))
    return tuple(together)


def next_chunk(tokens: int, most: int) -> int:
    """Number of tokens of a prompt's next step.

    No token is left alone if avoidable, and only a prompt's end has an odd number: so rows do not
    depend on how the prompt is cut. tokens: left; most: tokens of a step.
    """
    if tokens <= most or most < SHORTEST_STEP:
        return min(tokens, most)
    size = most - most % 2
    return size - 2 if tokens - size == 1 and size > SHORTEST_STEP else size
