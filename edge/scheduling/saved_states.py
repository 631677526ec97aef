"""States that the peers have saved: whose lies in which place, and where more are worth saving.

Pure. Keys and values of a request's first tokens are those that it had when it had no more; a state
is of all tokens so far. So who begins like another goes on from a state that was saved on the way:

* shortly before a prompt's end, because the next turn of a conversation begins with the prompt, but
  not always with all of it: a template may leave out of it what it had put where an answer begins;
* behind an answer, for a next turn that begins with all of it;
* where prompts part: the first one that is found to begin like another, further than anything was
  saved, has a state saved there for those that follow;
* a few times within a long prompt.

The place is taken that is worth least: what would have to be computed from the nearest state before
it, but less where it was not used for long (GreedyDual-Size, as in `residency.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.memory.recomputing import effort
from edge.scheduling.prefixes import common_tokens

SPARE_TOKENS = 4
"""Tokens of a prompt behind the last state that is saved of it: templates put as many where an
answer begins, say an empty thought, which the same answer has not in the next turn."""

PART_TOKENS = 2048
"""Between two states of a long prompt, or more: they may have half of the places."""

APART_TOKENS = 64
"""Between a state and one before it, where prompts part: fewer are computed as fast as saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """An order to copy the state that a request has after `tokens` tokens to a place."""

    request: str
    tokens: int
    place: int


@dataclass(slots=True, kw_only=True)
class _Saved:
    request: str
    tokens: NDArray[np.int64]
    """That it is of."""
    worth_from: float
    """What the one was worth that went before it was last used."""


class SavedStates:
    """By place. The owner decides which requests go."""

    def __init__(
        self, places: int, *, apart_tokens: int = APART_TOKENS, part_tokens: int = PART_TOKENS
    ) -> None:
        self._places = places
        self._apart_tokens = apart_tokens
        self._part_tokens = part_tokens
        self._saved: dict[int, _Saved] = {}
        self._worth = 0.0
        """Worth of the last one that another took the place of."""

    @property
    def saves_ends(self) -> bool:
        """Whether states behind answers are saved. A single place is for that of a prompt, the one
        that is surely begun with."""
        return self._places > 1

    def last(self, request: str, most: int) -> int:
        """Number of a request's tokens, `most` at the most, behind which there is a state; 0 for
        none."""
        return max((count for _, count in self._of(request) if count <= most), default=0)

    def save(self, request: str, tokens: NDArray[np.int64]) -> tuple[Save, str | None]:
        """Where its state of these tokens goes; and the request that has none any longer."""
        free = set(range(self._places)).difference(self._saved)
        same = [place for place, count in self._of(request) if count == len(tokens)]
        owner = None
        if same:
            place = same[0]
        elif free:
            place = min(free)
        else:
            worth = {place: self._worth_of(place) for place in self._saved}
            place = min(worth, key=worth.__getitem__)
            self._worth = max(self._worth, worth[place])
            owner = self._saved.pop(place).request
        self._saved[place] = _Saved(request=request, tokens=tokens, worth_from=self._worth)
        has_some = owner is not None and any(self._of(owner))
        save = Save(request=request, tokens=len(tokens), place=place)
        return save, None if has_some else owner

    def on_the_way(self, found: int, prompt_tokens: int, chunk_tokens: int) -> list[int]:
        """Numbers of tokens of a prompt behind which states are worth saving, whatever other
        prompts there are: the last one near its end. found: tokens of it that were found."""
        end = prompt_tokens - SPARE_TOKENS
        parts = 1 + self._places // 2
        part_tokens = max(self._part_tokens, -(-(end - found) // parts))
        part_tokens += -part_tokens % chunk_tokens
        return [*range(found + part_tokens, end - self._part_tokens // 2, part_tokens), max(0, end)]

    def worth_saving(
        self, prompt_tokens: int, found: int, alike: Iterable[int], chunk_tokens: int
    ) -> list[int]:
        """Likewise, and where others part from it.

        alike: tokens that it has in common with each of the others.
        """
        points = self.on_the_way(found, prompt_tokens, chunk_tokens)
        parting = max((each for each in alike if each < prompt_tokens), default=0)
        near = max((each for each in points if each <= parting), default=found)
        return [*points, parting] if parting - near >= self._apart_tokens else points

    def parting(self, point: int, saves: Iterable[int]) -> int:
        """Where one that will have such states has one for another that parts from it there: where
        it has one already, if that is near."""
        near = max((each for each in saves if each <= point), default=0)
        return near if point - near < self._apart_tokens else point

    def used(self, request: str, tokens: int) -> None:
        """Another one goes on from it."""
        for place, count in self._of(request):
            if count == tokens:
                self._saved[place].worth_from = self._worth

    def move(self, source: str, to: str, tokens: int) -> None:
        """What the source has of its first N tokens is the other's; the rest is nobody's."""
        for place, count in list(self._of(source)):
            if count <= tokens:
                self._saved[place].request = to
            else:
                del self._saved[place]

    def drop(self, request: str) -> None:
        """Nothing of it is left, if there was anything."""
        for place, _ in list(self._of(request)):
            del self._saved[place]

    def _of(self, request: str) -> Iterator[tuple[int, int]]:
        for place, saved in self._saved.items():
            if saved.request == request:
                yield place, len(saved.tokens)

    def _worth_of(self, place: int) -> float:
        saved = self._saved[place]
        before = (
            len(other.tokens)
            for each, other in self._saved.items()
            if each != place
            and len(other.tokens) <= len(saved.tokens)
            and other.tokens[-1] == saved.tokens[len(other.tokens) - 1]  # most differ here
            and common_tokens(other.tokens, saved.tokens) == len(other.tokens)
        )
        return saved.worth_from + effort(len(saved.tokens)) - effort(max(before, default=0))
