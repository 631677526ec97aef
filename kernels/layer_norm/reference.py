"""y = (x − mean(x)) / sqrt(var(x) + ε) · w + b, over the last axis (Ba et al., 2016)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def layer_norm(x: Array, weight: Array, bias: Array, *, epsilon: float) -> Array:
    """x [..., n]; weight, bias [n] → [..., n]."""
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    result: Array = (wide * scale * weight + bias).astype(np.float32)
    return result


def add_layer_norm(
    x: Array, addend: Array, weight: Array, bias: Array, *, epsilon: float
) -> tuple[Array, Array]:
    """s = x + addend; returns (layer_norm(s), s). x, addend [..., n]; weight, bias [n]."""
    total = (x + addend).astype(np.float32)
    return layer_norm(total, weight, bias, epsilon=epsilon), total
