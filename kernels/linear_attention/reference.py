"""Linear attention by the gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024).

Channels (all queries, then keys, then values) go through a causal convolution of each by itself,
and x · sigmoid(x). Queries and keys are divided by their lengths. Then for each value head, with
the query q and the key k of its key head, its value v and its state S [key_size, value_size]:

    S ← exp(g) · S,   g = −exp(rate) · softplus(decay + bias)
    S ← S + sigmoid(beta) · k ⊗ (v − Sᵀ k)
    o = Sᵀ q / sqrt(key_size)

What comes out of each head is normed, and multiplied by scale · gate · sigmoid(gate).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

WEIGHTS = ("convolution", "decay_bias", "decay_rate", "scale")
"""In the order of arguments."""

LENGTH_EPSILON = 1e-6
"""Added to the square of a head's length."""


def linear_attention(
    mixed: Array,
    gates: Array,
    past_channels: Array,
    past_states: Array,
    convolution: Array,
    decay_bias: Array,
    decay_rate: Array,
    scale: Array,
    *,
    key_heads: int,
    key_size: int,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    """(output [tokens, value_heads · value_size], and both that are past after these tokens).

    mixed [tokens, c + value_heads · value_size]: channels and gate; gates [tokens, 2 ·
    value_heads]: decay and beta; past: the last channels [width − 1, c] and the states
    [value_heads, key_size, value_size], zeros at first; convolution [c, width] or flat, decay_bias
    and decay_rate [value_heads], scale [value_size].
    """
    channels, gate = np.split(mixed, [past_channels.shape[-1]], axis=-1)
    decay, beta = np.split(gates, 2, axis=-1)
    convolution = convolution.reshape(channels.shape[-1], -1)
    seen = np.concatenate([past_channels, channels]).astype(np.float64)
    count, width = len(channels), convolution.shape[1]
    taps: list[NDArray[np.float64]] = [
        seen[tap : tap + count] * convolution[:, tap] for tap in range(width)
    ]
    active: NDArray[np.float64] = np.sum(taps, axis=0)
    active = active * _sigmoid(active)
    value_heads, value_size = decay.shape[1], len(scale)
    keys = key_heads * key_size
    each = value_heads // key_heads
    query, key = (
        np.repeat(
            _unit(active[:, start : start + keys].reshape(count, key_heads, -1)), each, axis=1
        )
        for start in (0, keys)
    )
    value = active[:, 2 * keys :].reshape(count, value_heads, value_size)
    factor = np.exp(-np.exp(decay_rate.astype(np.float64)) * np.logaddexp(0, decay + decay_bias))
    learnt = _sigmoid(beta.astype(np.float64))
    state, found = past_states.astype(np.float64), []
    for token in range(count):
        state = state * factor[token][:, None, None]
        known = np.einsum("hkv,hk->hv", state, key[token])
        new = (value[token] - known) * learnt[token][:, None]
        state = state + key[token][:, :, None] * new[:, None]
        found.append(np.einsum("hkv,hk->hv", state, query[token]) * key_size**-0.5)
    heads = np.stack(found)
    heads /= np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + epsilon)
    wide = gate.reshape(heads.shape).astype(np.float64)
    output = (heads * scale * wide * _sigmoid(wide)).reshape(count, -1)
    last = seen[len(seen) - width + 1 :].astype(np.float32)
    return output.astype(np.float32), last, state.astype(np.float32)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.exp(-np.logaddexp(0, -x))
    return found


def _unit(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.sqrt(np.sum(heads**2, axis=-1, keepdims=True) + LENGTH_EPSILON)
    unit: NDArray[np.float64] = heads / lengths
    return unit
