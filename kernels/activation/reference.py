"""silu(x) = x / (1 + e^−x) and gelu(x) = x · Φ(x), Φ the normal distribution function.

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
