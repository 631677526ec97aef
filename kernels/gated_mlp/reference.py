"""activation(gate) · up, with silu(x) = x / (1 + e^−x) and gelu(x) = x · Φ(x).

gelu_tanh is the usual approximation of gelu: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def gated(gate_up: Array, *, activation: Activation) -> Array:
    """gate_up [..., 2n], gate first → [..., n]."""
    half = gate_up.shape[-1] // 2
    gate = gate_up[..., :half].astype(np.float64)
    if activation == "silu":
        active = gate / (1.0 + np.exp(-gate))
    elif activation == "gelu":
        active = gate * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2))
    else:
        active = gate * 0.5 * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (active * gate_up[..., half:]).astype(np.float32)
