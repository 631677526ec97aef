"""activation(gate) · up.

Clamped (OpenAI, gpt-oss, 2025), with g = min(gate, limit): g / (1 + e^(−slope · g)) · (1 + up),
where up is kept within ± limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.activation.reference import Activation, activated

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    limit: float
    slope: float


def gated(gate_up: Array, *, activation: Activation, clamp: Clamp | None = None) -> Array:
    """gate_up [..., 2n], gate first → [..., n]. Only silu is clamped."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    if clamp is None:
        return (activated(gate, activation=activation).astype(np.float64) * up).astype(np.float32)
    wide, up = (
        np.minimum(gate.astype(np.float64), clamp.limit),
        np.clip(up, -clamp.limit, clamp.limit),
    )
    with np.errstate(over="ignore"):  # infinity, and the result is 0
        active = wide / (1.0 + np.exp(-clamp.slope * wide))
    return (active * (1 + up)).astype(np.float32)
