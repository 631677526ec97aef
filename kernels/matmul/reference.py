"""y = x · Wᵀ (+ b): the weight's rows are the outputs, as checkpoints store it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def matmul(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., inputs], weight [outputs, inputs], bias [outputs] → [..., outputs]."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return (y if bias is None else y + bias).astype(np.float32)
