"""softmax(q·kᵀ / sqrt(head size))·v of each head, over all rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def whole_attention(query: Array, keys: Array, values: Array, *, num_heads: int) -> Array:
    """query, keys, values [rows, num_heads · size] → like query."""
    q, k, v = (
        each.reshape(len(each), num_heads, -1).astype(np.float64) for each in (query, keys, values)
    )
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hts,shd->thd", weights, v).reshape(query.shape).astype(np.float32)
    return mixed
