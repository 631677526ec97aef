"""silu(gate) · up, with silu(x) = x / (1 + e^−x)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def gated_silu(gate_up: Array) -> Array:
    """gate_up [..., 2n], gate first → [..., n]."""
    half = gate_up.shape[-1] // 2
    gate = gate_up[..., :half].astype(np.float64)
    return (gate / (1.0 + np.exp(-gate)) * gate_up[..., half:]).astype(np.float32)
