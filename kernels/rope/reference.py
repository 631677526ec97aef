"""Rotary position embedding, the two halves of a head rotated against each other.

(a, b) = halves of x; y = (a·cos − b·sin, b·cos + a·sin), with angle position · frequency.
Source: Su et al., RoFormer, 2021; the half-split pairing is the one Llama checkpoints use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def rope_tables(
    inverse_frequencies: NDArray[np.float32], *, length: int, scale: float = 1.0
) -> tuple[Array, Array]:
    """(cos, sin), each [length, head_size / 2].

    The angle is a float32 product because reference models form it so; at position 100,000 a
    wider product would turn by a visibly different angle.
    """
    positions = np.arange(length, dtype=np.float32)
    angles = np.multiply.outer(positions, inverse_frequencies.astype(np.float32))
    cos = (np.cos(angles, dtype=np.float64) * scale).astype(np.float32)
    sin = (np.sin(angles, dtype=np.float64) * scale).astype(np.float32)
    return cos, sin


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """x [tokens, heads, head_size]; cos, sin [tokens, head_size / 2] → like x."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
