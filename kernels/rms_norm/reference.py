"""y = x / sqrt(mean(x²) + ε) · w, over the last axis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def rms_norm(x: Array, weight: Array, *, epsilon: float) -> Array:
    """x [..., n], weight [n] → [..., n]."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    result: Array = (wide * scale * weight).astype(np.float32)
    return result


def add_rms_norm(x: Array, addend: Array, weight: Array, *, epsilon: float) -> tuple[Array, Array]:
    """s = x + addend; returns (rms_norm(s), s). x, addend [..., n]; weight [n]."""
    total = (x + addend).astype(np.float32)
    return rms_norm(total, weight, epsilon=epsilon), total
