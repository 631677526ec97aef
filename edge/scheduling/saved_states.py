"""Saved states of recurrent layers: which request has which place, and where saving more pays.

Pure. Keys and values can be cut at any token, but a state sums up all tokens so far. A prompt can
therefore only continue from a state that was saved on the way:

* shortly before a prompt's end, because the next turn of a conversation begins with most of the
  prompt: templates may drop what they had put where the answer begins;
* after an answer, for a next turn that begins with all of it;
* where prompts diverge: the first prompt that shares a prefix beyond the saved states has one
  saved there for later ones;
* at a few positions within a long prompt.

A new state replaces the one that is worth least: the cost of recomputing it from the nearest state
before it, less the longer it was unused (GreedyDual-Size, as in `residency.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.memory.recomputing import effort
from edge.scheduling.prefixes import common_tokens

SPARE_TOKENS = 4
"""Tokens between the last saved state and a prompt's end. Templates put that many where an answer
begins, for example an empty thought, and drop them in the next turn."""

PART_TOKENS = 2048
"""Least tokens between two states of a long prompt, which may use half of the places."""

APART_TOKENS = 64
"""Least tokens between a state and one before it where prompts diverge: fewer are computed as fast
as saved."""


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
    """The tokens that it sums up."""
    worth_from: float
    """Worth of the last replaced state when this one was last used."""


class SavedStates:
    """Saved states by place. The owner decides which requests are dropped."""

    def __init__(
        self, places: int, *, apart_tokens: int = APART_TOKENS, part_tokens: int = PART_TOKENS
    ) -> None:
        self._places = places
        self._apart_tokens = apart_tokens
        self._part_tokens = part_tokens
        self._saved: dict[int, _Saved] = {}
        self._worth = 0.0
        """Worth of the last replaced state."""

    @property
    def saves_ends(self) -> bool:
        """Whether states after answers are saved. A single place is kept for the prompt's state,
        which is certain to be reused."""
        return self._places > 1

    def last(self, request: str, most: int) -> int:
        """The last saved position of a request, at most `most`; 0 if there is none."""
        return max((count for _, count in self._of(request) if count <= most), default=0)

    def save(self, request: str, tokens: NDArray[np.int64]) -> tuple[Save, str | None]:
        """Save its state after these tokens. Returns the order, and the request that thereby has no
        state any more."""
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
        """Positions of a prompt worth saving, independent of other prompts; the last one is near
        its end. found: tokens in its found prefix."""
        end = prompt_tokens - SPARE_TOKENS
        parts = 1 + self._places // 2
        part_tokens = max(self._part_tokens, -(-(end - found) // parts))
        part_tokens += -part_tokens % chunk_tokens
        return [*range(found + part_tokens, end - self._part_tokens // 2, part_tokens), max(0, end)]

    def worth_saving(
        self, prompt_tokens: int, found: int, alike: Iterable[int], chunk_tokens: int
    ) -> list[int]:
        """Positions worth saving, including where other prompts diverge from it.

        alike: tokens in common with each of the others.
        """
        points = self.on_the_way(found, prompt_tokens, chunk_tokens)
        parting = max((each for each in alike if each < prompt_tokens), default=0)
        near = max((each for each in points if each <= parting), default=found)
        return [*points, parting] if parting - near >= self._apart_tokens else points

    def parting(self, point: int, saves: Iterable[int]) -> int:
        """The position to save for another prompt that diverges at `point`: one planned already, if
        it is near."""
        near = max((each for each in saves if each <= point), default=0)
        return near if point - near < self._apart_tokens else point

    def used(self, request: str, tokens: int) -> None:
        """Another request continues from this state."""
        for place, count in self._of(request):
            if count == tokens:
                self._saved[place].worth_from = self._worth

    def move(self, source: str, to: str, tokens: int) -> None:
        """The first `tokens` tokens of `source` now belong to `to`; its later states are
        dropped."""
        for place, count in list(self._of(source)):
            if count <= tokens:
                self._saved[place].request = to
            else:
                del self._saved[place]

    def drop(self, request: str) -> None:
        """Drop all states of a request, if it has any."""
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
            and other.tokens[-1]
            == saved.tokens[
                len(other.tokens) - 1
            ]  # compare the last token first: most differ there
            and common_tokens(other.tokens, saved.tokens) == len(other.tokens)
        )
        return saved.worth_from + effort(len(saved.tokens)) - effort(max(before, default=0))
