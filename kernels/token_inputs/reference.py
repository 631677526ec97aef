"""A layer's own inputs of each token: a product of its embedding, normed, and a row of a table.

So Gemma 3n and 4 make them ("per-layer embeddings"; transformers, modeling_gemma4).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.rms_norm.reference import rms_norm

Array = NDArray[np.float32]


def token_inputs(
    product: Array, rows: Array, norm: Array, *, hidden_size: int, epsilon: float
) -> Array:
    """product, rows [..., n], norm [n] → [..., n]. product: of an embedding of hidden_size."""
    made = rms_norm(product * np.float32(hidden_size**-0.5), norm, epsilon=epsilon)
    result: Array = ((made + rows * rows.shape[-1] ** 0.5) * 2**-0.5).astype(np.float32)
    return result
