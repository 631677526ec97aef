"""y = scale · x, then with a soft cap c: c · tanh(y / c)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def finish_logits(x: Array, *, scale: float, soft_cap: float | None) -> Array:
    """x [..., n] → like x."""
    y = x.astype(np.float64) * scale
    if soft_cap is not None:
        y = soft_cap * np.tanh(y / soft_cap)
    return y.astype(np.float32)
