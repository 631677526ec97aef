"""Pictures in a prompt: rotary positions by three axes, and rows that see each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.protocol.step import StepEntry
from edge.scheduling.prefixes import Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptPictures:
    """The pictures of one prompt, in a model in which their places matter."""

    turns: NDArray[np.int64] | None
    """Rotary positions [axes, tokens of the prompt]; None: these are the tokens' own."""
    blocks: tuple[Span, ...]
    """The rows that see each other, each block in one step; empty: rows see what is before them."""

    def placed(self, entry: StepEntry) -> StepEntry:
        """A request's entry of a step, with what steps are told of pictures."""
        sees_all = any(first <= entry.position < last for first, last in self.blocks)
        if self.turns is None:
            return replace(entry, sees_all=sees_all) if sees_all else entry
        prompt_tokens = self.turns.shape[1]
        told = min(entry.end, prompt_tokens)
        shift = told - 1 - int(self.turns[:, :told].max())
        places = np.arange(entry.position, entry.end)
        if entry.position >= prompt_tokens:
            return replace(entry, shift=shift)
        turns = np.broadcast_to(places - shift, (len(self.turns), len(places))).copy()
        known = self.turns[:, entry.position : entry.end]
        turns[:, : known.shape[1]] = known
        apart = places - turns
        if (apart == apart[0, 0]).all():  # no row of a picture, and none between its tokens
            return replace(entry, shift=int(apart[0, 0]), sees_all=sees_all)
        return replace(
            entry, turns=tuple(turns.reshape(-1).tolist()), shift=shift, sees_all=sees_all
        )


def turned(prompt: Sequence[int], grids: Mapping[int, tuple[int, int]]) -> NDArray[np.int64]:
    """Rotary positions [3, tokens] of a prompt (M-RoPE: Bai et al., Qwen2.5-VL, 2025).

    grids: rows and columns of each picture, by the position of its first row. Within a picture the
    first axis stays, the second counts its rows and the third its columns; what follows it is at
    the position behind the longer side.
    """
    found = np.empty((3, len(prompt)), np.int64)
    at = place = 0
    for first in sorted(grids):
        height, width = grids[first]
        count = height * width
        found[:, at:first] = np.arange(place, place + first - at)
        place += first - at
        rows, columns = np.divmod(np.arange(count), width)
        found[:, first : first + count] = place
        found[1, first : first + count] += rows
        found[2, first : first + count] += columns
        at, place = first + count, place + max(height, width)
    found[:, at:] = np.arange(place, place + len(prompt) - at)
    return found
