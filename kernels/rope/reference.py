"""Rotary position embedding: pairs (a, b) of a head's elements rotated against each other.

(a, b) becomes (a·cos − b·sin, b·cos + a·sin), with angle position · frequency. Of n turned elements
pair i is (i, i + n/2), which Llama checkpoints use, or interleaved (2i, 2i + 1). Elements past the
turned ones stay. Source: Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def rope_tables(
    inverse_frequencies: NDArray[np.float32], *, length: int, scale: float = 1.0
) -> tuple[Array, Array]:
    """(cos, sin), each [length, pairs].

    The angle is a float32 product because reference models form it so; at position 100,000 a
    wider product would turn by a visibly different angle.
    """
    positions = np.arange(length, dtype=np.float32)
    angles = np.multiply.outer(positions, inverse_frequencies.astype(np.float32))
    cos = (np.cos(angles, dtype=np.float64) * scale).astype(np.float32)
    sin = (np.sin(angles, dtype=np.float64) * scale).astype(np.float32)
    return cos, sin


def rope(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """x [tokens, heads, head_size]; cos, sin [tokens, pairs] → like x."""
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs]
    halves = slice(0, pairs), slice(pairs, 2 * pairs)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else halves
    a, b = turned[..., first], turned[..., second]
    c, s = cos[:, None, :], sin[:, None, :]
    result = x.copy()
    result[..., : 2 * pairs][..., first] = a * c - b * s
    result[..., : 2 * pairs][..., second] = b * c + a * s
    return result
