"""Drafts: guesses at an answer's next tokens, which a single step verifies (speculative decoding).

Prompt lookup after Saxena (2023): text that repeats continues as it did before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from edge.models.pictures import is_row

_GRAM = 3
"""Fewest tokens that a place has in common with the end. Fewer are common by chance."""

_LONGEST = 32
"""Common tokens that are counted; of places with more the newest is taken."""

_PLACES = 8
"""Places that are compared, the newest first."""

_TOKEN_BITS = 21

_MOST_INDEXED = 1 << 15
"""Tokens before the first lookup that are indexed, the newest ones: each takes some 140 bytes."""


class Drafter(Protocol):
    """Guesses an answer's next tokens. Called from one thread."""

    @property
    def looks_back(self) -> bool:
        """Whether `propose` may be asked for each earlier `end`, which costs next to nothing. So
        the share of right guesses is known before any step verified one."""
        ...

    @property
    def guess_s(self) -> float:
        """Seconds for which `propose` waits for each of its tokens."""
        ...

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        """The first tokens of a prompt, whose answer may be asked for soon."""
        ...

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow the first `end` tokens of the request. No earlier
        `end` was greater, and the tokens before it stay as they are."""
        ...

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        """The outcome of a draft: its length, and how many of its tokens were right."""
        ...

    def forget(self, request: str) -> None:
        """The request is over. Unknown ones are ignored."""
        ...


class SuffixLookup:
    """A Drafter that looks up the longest end of the tokens that occurs earlier in them.

    A call takes some microseconds, and the first one of a request one for each token before it.
    """

    looks_back = True
    guess_s = 0.0

    def __init__(self) -> None:
        self._indexes: dict[str, _Index] = {}

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        """Ignored: tokens are indexed when they are looked up."""

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        if end < _GRAM or most < 1:
            return ()
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _Index(max(_GRAM, end - _MOST_INDEXED))
        index.extend(tokens, end)
        place = index.longest(tokens, end)
        if place is None:
            return ()
        period = end - place
        guesses = (tokens[place + number % period] for number in range(most))
        return list(takewhile(lambda each: not is_row(each), guesses))

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        """Ignored: the tokens tell it."""

    def forget(self, request: str) -> None:
        self._indexes.pop(request, None)


class _Index:
    """The places behind each run of `_GRAM` tokens of a request."""

    def __init__(self, first: int) -> None:
        """first: the first place."""
        self._first = first
        self._newest: dict[int, int] = {}
        """The newest place behind these tokens."""
        self._before = array("q")
        """By place, from the first on, the next older one behind the same tokens; −1: none."""

    def extend(self, tokens: Sequence[int], end: int) -> None:
        for place in range(self._first + len(self._before), end + 1):
            key = _key(tokens, place)
            self._before.append(self._newest.get(key, -1))
            self._newest[key] = place

    def longest(self, tokens: Sequence[int], end: int) -> int | None:
        """The place before `end` with the most tokens in common before it."""
        place, best, most = self._before[end - self._first], None, 0
        for _each in range(_PLACES):
            if place < 0:
                break
            common = _GRAM
            while common < min(place, _LONGEST) and (
                tokens[place - 1 - common] == tokens[end - 1 - common]
            ):
                common += 1
            if common > most:
                best, most = place, common
            if most == _LONGEST:
                break
            place = self._before[place - self._first]
        return best


def _key(tokens: Sequence[int], place: int) -> int:
    key = 0
    for token in tokens[place - _GRAM : place]:
        key = key << _TOKEN_BITS | token
    return key
