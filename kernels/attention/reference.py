"""softmax(scale · q·kᵀ + mask)·v, with grouped KV heads and an optional window.

Query t at absolute position p sees keys 0 … p, or with a window w only p − w + 1 … p. With a soft
cap c a score s becomes c · tanh(s / c). A sink is one more score of each head, without a value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def attention(
    query: Array,
    keys: Array,
    values: Array,
    *,
    position: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attend `tokens` queries, the first at `position`, to `position + tokens` keys.

    query [tokens, num_heads, head_size]; keys, values [position + tokens, num_kv_heads, head_size];
    sinks [num_heads] → [tokens, num_heads, head_size]. Query head i reads KV head
    i // (num_heads / num_kv_heads). scale: 1 / sqrt(head_size) if it is not given.
    """
    tokens, num_heads, head_size = query.shape
    group = num_heads // keys.shape[1]
    k = np.repeat(keys, group, axis=1).astype(np.float64)
    v = np.repeat(values, group, axis=1).astype(np.float64)
    scores = np.einsum("thd,shd->hts", query.astype(np.float64), k)
    scores *= 1 / np.sqrt(head_size) if scale is None else scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    query_at = position + np.arange(tokens)[:, None]
    key_at = np.arange(keys.shape[0])[None, :]
    visible = key_at <= query_at
    if window is not None:
        visible &= key_at > query_at - window
    scores = np.where(visible[None], scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks[:, None, None], (num_heads, tokens, 1))
        scores = np.concatenate([scores, sink], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weights = weights[..., : keys.shape[0]]
    result: Array = np.einsum("hts,shd->thd", weights, v).astype(np.float32)
    return result
