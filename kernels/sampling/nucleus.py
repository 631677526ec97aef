"""Top-p, exactly: the fewest of the likeliest tokens that together reach a share of all weight.

Sums are whole numbers, so they are the same in whatever order, and over whatever parts of the
vocabulary, they were taken. With t_i = s_i · log2(e) / T and e_i = ⌊t_i⌋, the *octave* of a token:

    w_i = 2^(e_i - 30) · round(2^30 · 2^(t_i - e_i))

which is exp(s_i / T) to 30 bits. Tokens 64 octaves below the likeliest weigh nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_OCTAVES = 64

BLOCK = 16384
"""Scores worked on at once: their temporaries stay in the cache, and nothing large is allocated."""

_UNIT = float(1 << 30)
_STEEPEST = 2.0**700  # times any float32 it is finite, and it still tells all float32 apart
_BINS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Octaves:
    """The weight of some tokens, by octaves."""

    top: float
    """The octave of the likeliest of them, a whole number; -inf for no tokens."""
    sums: NDArray[np.int64]
    """int64 (64,): number j is the weight in octave `top` - j, in units of 2^(top - j - 30)."""

    @property
    def total(self) -> int:
        """All weight, in units of 2^(top - 93)."""
        return sum(_in_last_units(int(units), j) for j, units in enumerate(self.sums))


def weigh(scores: NDArray[np.float32], temperature: float) -> Octaves:
    """The weight of the tokens with these scores (any number of them)."""
    sums = np.zeros(NUM_OCTAVES, np.int64)
    if not scores.size:
        return Octaves(top=-math.inf, sums=sums)
    top = float(np.floor(float(scores.max()) * _steepness(temperature)))
    for start in range(0, scores.size, BLOCK):
        octaves, units = _weights(scores[start : start + BLOCK], temperature)
        below = np.minimum(top - octaves, NUM_OCTAVES).astype(np.intp)
        # Below 2^53, as every block's sums are, float64 adds whole numbers exactly.
        counted = np.bincount(below, weights=units, minlength=NUM_OCTAVES + 1)
        sums += counted[:NUM_OCTAVES].astype(np.int64)
    return Octaves(top=top, sums=sums)


def add_octaves(parts: Sequence[Octaves]) -> Octaves:
    """The weight of all parts together: bit for bit what `weigh` says of all their tokens."""
    top = max(part.top for part in parts)
    sums = np.zeros(NUM_OCTAVES, np.int64)
    for part in parts:
        below = top - part.top  # not finite where nothing is
        if below < NUM_OCTAVES:
            sums[int(below) :] += part.sums[: NUM_OCTAVES - int(below)]
    return Octaves(top=top, sums=sums)


def nucleus_end(
    octaves: Octaves,
    scores: NDArray[np.float32],
    ids: NDArray[np.int64] | None,
    *,
    temperature: float,
    top_p: float,
) -> tuple[np.float32, int] | None:
    """(score, id) of the token at which the likeliest together reach `top_p` of all weight.

    octaves: the weight of all tokens. scores, ids: the likeliest of them, as many as are known, by
    rising id; without ids they are numbered from 0. Equal scores rank by rising id. None if those
    known do not reach it.

    Ranking 150,000 tokens takes 15 ms. Instead the octave that reaches the share is found from the
    sums, then a bin of scores within it, and only that bin is ranked.
    """
    total = octaves.total
    missing = min(max(math.ceil(top_p * float(total)), 1), total)
    for below, units in enumerate(octaves.sums):
        weight = _in_last_units(int(units), below)
        if weight >= missing:
            break
        missing -= weight
    needed = -(-missing >> (NUM_OCTAVES - 1 - below))  # in units of this octave, rounded up
    inside, shares, units = _octave(scores, temperature, octaves.top - below)
    bins = ((2.0 - shares) * _BINS).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, weights=units, minlength=1).astype(np.int64))
    border = int(np.searchsorted(reached, needed, side="left"))
    if border == reached.size:
        return None
    if border:
        needed -= int(reached[border - 1])
    last = np.flatnonzero(bins == border)
    last = last[np.argsort(-scores[inside[last]], kind="stable")]
    place = int(np.searchsorted(np.cumsum(units[last].astype(np.int64)), needed, side="left"))
    end = int(inside[last[place]])
    return scores[end], end if ids is None else int(ids[end])


def _octave(
    scores: NDArray[np.float32], temperature: float, octave: float
) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]:
    """The tokens of one octave: their places, their weights as 1 to 2, and as whole units."""
    places, units = [np.empty(0, np.intp)], [np.empty(0)]
    for start in range(0, scores.size, BLOCK):
        found, weights = _weights(scores[start : start + BLOCK], temperature)
        inside = np.flatnonzero(found == octave)
        places.append(inside + start)
        units.append(weights[inside])
    whole = np.concatenate(units)
    return np.concatenate(places), whole / _UNIT, whole


def _weights(
    scores: NDArray[np.float32], temperature: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Octave e_i and weight in units of 2^(e_i - 30) of each token, whole numbers as float64."""
    exponents = scores.astype(np.float64)
    exponents *= _steepness(temperature)
    octaves = np.floor(exponents)
    exponents -= octaves
    units = np.exp2(exponents, out=exponents)
    units *= _UNIT
    return octaves, np.rint(units, out=units)


def _steepness(temperature: float) -> float:
    return min(math.log2(math.e) / temperature, _STEEPEST)


def _in_last_units(units: int, below: int) -> int:
    return units << (NUM_OCTAVES - 1 - below)
