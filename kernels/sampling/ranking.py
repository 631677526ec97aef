"""The ranking of tokens, and how far down it the filters keep them.

Ranked is by falling score, equal scores by rising id. What top-k, min-p and top-p keep are always
the tokens up to some place of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.sampling.nucleus import Octaves, nucleus_end, weigh
from edge.kernels.sampling.parameters import SamplingParameters

_NO_ID = 1 << 31
"""Above every token id."""

_GROUP = 64
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """A place in the ranking: before it are higher scores, and equal ones up to an id."""

    score: np.float32
    last_id: int = _NO_ID

    def is_within(self, other: Border) -> bool:
        """Whether no token before this place is after the other."""
        return (self.score, -self.last_id) >= (other.score, -other.last_id)

    def kept(
        self, scores: NDArray[np.float32], ids: NDArray[np.int64] | None = None
    ) -> NDArray[np.intp]:
        """The places of the tokens before the border, rising; without ids they count from 0."""
        places = np.flatnonzero(scores >= self.score)
        if self.last_id >= _NO_ID:
            return places
        found = places if ids is None else ids[places]
        return places[(scores[places] > self.score) | (found <= self.last_id)]


EVERYTHING = Border(score=np.float32(-np.inf))


def limits_count(parameters: SamplingParameters, vocab_size: int) -> bool:
    """Whether top-k keeps less than everything."""
    return 0 < parameters.top_k < vocab_size


def truncates(parameters: SamplingParameters, vocab_size: int) -> bool:
    """Whether the draw is among less than all tokens."""
    return parameters.temperature > 0.0 and (
        parameters.min_p > 0.0 or parameters.top_p < 1.0 or limits_count(parameters, vocab_size)
    )


def find_border(
    scores: NDArray[np.float32],
    parameters: SamplingParameters,
    *,
    vocab_size: int,
    ids: NDArray[np.int64] | None = None,
    known: Border = EVERYTHING,
    octaves: Octaves | None = None,
) -> Border | None:
    """The place where the filters stop, for a temperature above 0. None if it is after `known`.

    scores: of all tokens of the vocabulary that rank before `known`, at least one and at least
    top_k; ids: theirs, rising, and without them they count from 0. octaves: the weight of the whole
    vocabulary; needed only if these are not all tokens and top-k keeps all of them.
    """
    temperature = parameters.temperature
    border = EVERYTHING
    if limits_count(parameters, vocab_size):
        border = Border(score=_kth_largest(scores, parameters.top_k))
        if not border.is_within(known):
            return None
    borders = [border]
    if parameters.min_p > 0.0:
        lowest = float(scores.max()) + temperature * math.log(parameters.min_p)
        borders.append(Border(score=float32_at_least(lowest)))
    if parameters.top_p < 1.0:
        if border is not EVERYTHING:
            inside = border.kept(scores)
            scores, ids = scores[inside], inside if ids is None else ids[inside]
        if border is not EVERYTHING or octaves is None:
            octaves = weigh(scores, temperature)
        end = nucleus_end(octaves, scores, ids, temperature=temperature, top_p=parameters.top_p)
        if end is None:
            return None
        borders.append(Border(score=end[0], last_id=end[1]))
    nearest = max(borders, key=lambda each: (each.score, -each.last_id))
    return nearest if nearest.is_within(known) else None


def likeliest(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Places of the `count` tokens that rank first, in the order of the ranking; all if fewer."""
    places = _at_least_largest(scores, count)
    return places[np.argsort(-scores[places], kind="stable")[:count]]


def float32_at_least(value: float) -> np.float32:
    """The least finite float32 that is not below `value`; the largest, if all are."""
    nearest = np.float32(min(max(value, -_LARGEST), _LARGEST))
    if float(nearest) >= value:
        return nearest
    return min(np.nextafter(nearest, np.float32(np.inf)), np.float32(_LARGEST))


def _kth_largest(scores: NDArray[np.float32], count: int) -> np.float32:
    found = scores[_at_least_largest(scores, count)]
    border = max(found.size - count, 0)
    least: np.float32 = np.partition(found, border)[border]
    return least


def _at_least_largest(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Places, rising, of the `count` largest scores, of those equal to the least, and of some more.

    The largest of each of many groups are found 15 times faster than 150,000 scores are
    partitioned; `count` groups have a score as large as the count-th of those, and no less.
    """
    groups = scores.size // _GROUP
    if groups <= count:
        if scores.size <= count:
            return np.arange(scores.size)
        border = scores.size - count
        return np.flatnonzero(scores >= np.partition(scores, border)[border])
    largest = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    border = groups - count
    return np.flatnonzero(scores >= np.partition(largest, border)[border])
