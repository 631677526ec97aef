"""softmax(q · kᵀ · scale) · v for each head, over all patches of a tile (Vaswani et al., 2017), or
over those of a patch's window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def patch_attention(q: Array, k: Array, v: Array, *, num_heads: int, scale: float) -> Array:
    """q, k, v [batch, patches, heads · head_size] → like q."""
    query, key, value = (
        each.reshape(*each.shape[:2], num_heads, -1).transpose(0, 2, 1, 3).astype(np.float64)
        for each in (q, k, v)
    )
    scores = query @ key.swapaxes(2, 3) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = weights / weights.sum(axis=-1, keepdims=True) @ value
    result: Array = found.transpose(0, 2, 1, 3).reshape(q.shape).astype(np.float32)
    return result


def window_attention(
    q: Array,
    k: Array,
    v: Array,
    members: NDArray[np.int64],
    counts: NDArray[np.int32],
    back: NDArray[np.int64],
    *,
    num_heads: int,
    scale: float,
) -> Array:
    """q, k, v [1, patches, heads · head_size] → like q. members [windows, most]: the patches of
    each window, of which the first `counts` [windows] are meant. back [patches]: the place of each
    patch in the flat members."""
    found = np.zeros_like(q)
    for some, count in zip(members, counts, strict=True):
        own = some[:count]
        of_window = (each[:, own] for each in (q, k, v))
        found[:, own] = patch_attention(*of_window, num_heads=num_heads, scale=scale)
    return found
