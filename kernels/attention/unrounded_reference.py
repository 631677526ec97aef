"""Attention to codes, of which each query sees the first and the newest tokens as they were.

With keys k and values v, what their codes stand for, k̂ and v̂, and E the first token and the N
newest ones, the query itself included:

    sₖ = q·kₖ where k is in E, else q·k̂ₖ;  p = softmax(s);  Σ pₖ vₖ over E + Σ pₖ v̂ₖ over the rest

(After KIVI, Liu et al., 2024: a window of newest tokens that are not rounded; and StreamingLLM,
Xiao et al., 2024: the first token is what queries look at where they look for nothing.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def attention(
    query: Array,
    exact: tuple[Array, Array],
    rounded: tuple[Array, Array],
    *,
    position: int,
    newest: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    sees_all: bool = False,
) -> Array:
    """query [tokens, num_heads, head_size], the first at `position`; exact and rounded: keys and
    values [position + tokens, num_kv_heads, head_size]; sinks [num_heads] → like query.
    sees_all: see the reference of attention.
    """
    tokens, num_heads, head_size = query.shape
    group = num_heads // exact[0].shape[1]
    factor = head_size**-0.5 if scale is None else scale
    k, v, rounded_k, rounded_v = (
        np.repeat(each, group, axis=1).astype(np.float64) for each in (*exact, *rounded)
    )
    query_at = position + np.arange(tokens)[:, None]
    key_at = np.arange(len(k))[None, :]
    is_exact = (key_at > query_at - newest) | (key_at == 0)
    both = (np.einsum("thd,shd->hts", query.astype(np.float64), each) for each in (k, rounded_k))
    scores = factor * np.where(is_exact, *both)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    visible = (key_at <= query_at) | sees_all
    if window is not None:
        visible &= key_at > query_at - window
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks[:, None, None], (num_heads, tokens, 1))
        scores = np.concatenate([scores, sink], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weights = weights[..., : len(k)]
    result: Array = (
        np.einsum("hts,shd->thd", weights * is_exact, v)
        + np.einsum("hts,shd->thd", weights * ~is_exact, rounded_v)
    ).astype(np.float32)
    return result
