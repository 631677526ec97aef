"""activation(gate) · up, with silu(x) = x / (1 + e^−x) and gelu(x) = x · Φ(x).

gelu_tanh is the usual approximation of gelu: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).

Clamped (OpenAI, gpt-oss, 2025), with g = min(gate, limit): g / (1 + e^(−slope · g)) · (1 + up),
where up is kept within ± limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    limit: float
    slope: float


def activated(x: Array, *, activation: Activation) -> Array:
    """x [...] → like x: what a block without a gate has between its two products."""
    wide = x.astype(np.float64)
    if activation == "silu":
        active = wide / (1.0 + np.exp(-wide))
    elif activation == "gelu":
        active = wide * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-wide / math.sqrt(2))
    else:
        active = wide * 0.5 * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    result: Array = active.astype(np.float32)
    return result


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
    active = wide / (1.0 + np.exp(-clamp.slope * wide))
    return (active * (1 + up)).astype(np.float32)
