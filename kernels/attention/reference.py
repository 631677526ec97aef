"""softmax(scale · q·kᵀ + mask)·v, with grouped KV heads and an optional window.

Query t at absolute position p sees keys 0 … p, or with a window w only p − w + 1 … p. With a soft
cap c a score s becomes c · tanh(s / c). A sink is one more score of each head, without a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.rms_norm.reference import rms_norm
from edge.kernels.rope.reference import rope

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
    sees_all: bool = False,
) -> Array:
    """Attend `tokens` queries, the first at `position`, to `position + tokens` keys.

    query [tokens, num_heads, head_size]; keys, values [position + tokens, num_kv_heads, head_size];
    sinks [num_heads] → [tokens, num_heads, head_size]. Query head i reads KV head
    i // (num_heads / num_kv_heads). scale: 1 / sqrt(head_size) if it is not given. sees_all: the
    tokens see those behind them, too, as the rows of a picture do.
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
    visible = (key_at <= query_at) | sees_all
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, gates, keys and values [tokens, heads, head_size], normed and rotated."""

    query: Array
    gates: Array
    keys: Array
    values: Array

    def step(self, first: int, end: int) -> Heads:
        """The tokens `first` … `end` − 1, with the keys and values of all up to them."""
        return Heads(
            query=self.query[first:end],
            gates=self.gates[first:end],
            keys=self.keys[:end],
            values=self.values[:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAttention:
    """Attention from one product of queries, keys and values to its output.

    The queries may be followed by gates.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    turned_elements: int
    interleaved: bool = False
    scale: float | None = None
    """None: 1 / sqrt(head_size)."""
    window: int | None = None
    soft_cap: float | None = None
    joint_norm: bool = False
    """All heads of query are normed together, and all of key, by weights of as many elements."""
    value_norm: bool = False
    """Each head of value is normed, by no weights."""
    gated: bool = False
    """The output is multiplied by the sigmoids of the gates."""
    epsilon: float = 1e-6

    @property
    def columns(self) -> int:
        """Columns of the packed product."""
        return sum(self._counts) * self.head_size

    @property
    def _counts(self) -> tuple[int, ...]:
        gates = self.num_heads * self.gated
        return self.num_heads, gates, self.num_kv_heads, self.num_kv_heads

    def heads(
        self, qkv: Array, cos: Array, sin: Array, norms: tuple[Array, Array] | None = None
    ) -> Heads:
        """qkv [tokens, columns]; cos, sin [tokens, pairs]; norms: weights of query and key."""
        packed = qkv.reshape(len(qkv), sum(self._counts), self.head_size)
        query, gates, keys, values = np.split(packed, np.cumsum(self._counts)[:-1], axis=1)
        if norms is not None:
            query, keys = (
                rms_norm(x.reshape(len(x), -1, w.size), w, epsilon=self.epsilon).reshape(x.shape)
                for x, w in zip((query, keys), norms, strict=True)
            )
        if self.value_norm:
            values = rms_norm(values, np.ones(self.head_size, np.float32), epsilon=self.epsilon)
        query, keys = (rope(x, cos, sin, interleaved=self.interleaved) for x in (query, keys))
        return Heads(query=query, gates=gates, keys=keys, values=values)

    def attend(self, heads: Heads, sinks: Array | None = None) -> Array:
        """What the last tokens make of all: [tokens, num_heads · head_size]."""
        mixed = attention(
            heads.query,
            heads.keys,
            heads.values,
            position=len(heads.keys) - len(heads.query),
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )
        if self.gated:
            mixed = mixed / (1 + np.exp(-heads.gates))
        return mixed.reshape(len(mixed), -1)
