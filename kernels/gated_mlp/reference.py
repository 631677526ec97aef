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


def gated(gate_up: Array, *, activation: Activation, clamp: Clamp | None = None) -> Array:
    """gate_up [..., 2n], gate first → [..., n]. Only silu is clamped."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].astype(np.float64), gate_up[..., half:]
    if clamp is not None:
        gate, up = np.minimum(gate, clamp.limit), 1 + np.clip(up, -clamp.limit, clamp.limit)
        active = gate / (1.0 + np.exp(-clamp.slope * gate))
    elif activation == "silu":
        active = gate / (1.0 + np.exp(-gate))
    elif activation == "gelu":
        active = gate * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2))
    else:
        active = gate * 0.5 * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (active * up).astype(np.float32)
