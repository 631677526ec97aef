"""Gumbel noise for every token: a pure function of (seed, position, token id).

The token with the largest `log w_i + noise_i` is a draw with chances proportional to the weights w
(Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014). No sum over the vocabulary is taken,
so each shard finds the winner of its part, and the best of those wins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOISE_SPREAD = 41.0
"""No noise is this far above another: they lie between -3.61 and 36.74."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def gumbel_noise(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Independent draws of the standard Gumbel distribution, float64 of the shape of `ids`.

    seed, position: at least 0 and below 2^64.

    Random bits are word number `id` of the SplitMix64 stream (Steele, Lea and Flood, 2014) whose
    start is word number `position` of the stream that starts with the seed. It takes any token
    alone, and for all of 150,000 it takes less time than numpy's Philox.
    """
    start = _split_mix(np.array([seed], np.uint64), np.array([position], np.uint64))
    bits = _split_mix(start, ids.astype(np.uint64))
    bits >>= np.uint64(12)
    # 52 bits and a half: never 0, never 1, and exact.
    noise = bits.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _split_mix(start: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Word number `index` of the stream that begins at `start`, modulo 2^64 throughout."""
    word = index * _STEP
    word += start + _STEP
    for shift, mixer in zip((30, 27), _MIXERS, strict=True):
        word ^= word >> np.uint64(shift)
        word *= mixer
    word ^= word >> np.uint64(31)
    return word
