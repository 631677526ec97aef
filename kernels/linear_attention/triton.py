"""Linear attention by the gated delta rule on a GPU, over states that stay in place.

A program has some columns of one value head's state in registers, and takes its sequence's tokens
one after the other: each is a few products and sums of that tile, and nothing of the state goes to
memory in between. So a token's result does not depend on where a prompt is cut, or on who else is
in the step. For that, nothing is fused but what says so: the compiler may hold the tile in two
layouts at once, and would round each in its own way. A chunk of a prompt is as many steps as it has
tokens, though, and keeps few programs busy: in the chunked form (Yang et al., Parallelizing Linear
Transformers with the Delta Rule, 2024) what 64 tokens do to a state is written as products of
matrices, which tensor cores compute.

The convolution before it is that of `short_convolution`; the norm behind it needs all columns of a
head, so it is a launch of its own. All in between is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.linear_attention.reference import LENGTH_EPSILON
from edge.kernels.short_convolution.triton import causal_convolution
from edge.kernels.triton_launch import FLOATS, INTEGERS, Launch, check, output, padded

_TILE = 4096
"""Elements of a state in a program: 32 registers of each thread."""


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^−x), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _delta_kernel(
    seen, gates, states, decay_bias, decay_rate, slots, starts, out, key_heads, value_heads,
    score_scale, length_epsilon,
    key_size: tl.constexpr, value_size: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head, for the tokens of one sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, keys), tl.program_id(2) * values + tl.arange(0, values)
    is_key, is_value = key < key_size, value < value_size
    key_head = head // (value_heads // key_heads)
    channels = 2 * key_heads * key_size + value_heads * value_size
    place = tl.load(slots + sequence).to(tl.int64) * value_heads + head
    tile = states + place * key_size * value_size + key[:, None] * value_size + value[None, :]
    is_inside = is_key[:, None] & is_value[None, :]
    state = tl.load(tile, mask=is_inside, other=0.0)
    rate = tl.exp(tl.load(decay_rate + head).to(tl.float32))
    bias = tl.load(decay_bias + head).to(tl.float32)
    first = tl.load(starts + sequence).to(tl.int64)
    last = tl.load(starts + sequence + 1).to(tl.int64)
    for row in range(first, last):
        query_row = seen + row * channels + key_head * key_size
        value_row = seen + row * channels + 2 * key_heads * key_size + head * value_size
        query = tl.load(query_row + key, mask=is_key, other=0.0)
        known = tl.load(query_row + key_heads * key_size + key, mask=is_key, other=0.0)
        new = tl.load(value_row + value, mask=is_value, other=0.0)
        query = query / tl.sqrt(tl.sum(query * query, axis=0) + length_epsilon) * score_scale
        known = known / tl.sqrt(tl.sum(known * known, axis=0) + length_epsilon)
        gate_row = gates + row * 2 * value_heads + head
        decay = tl.load(gate_row).to(tl.float32) + bias
        softplus = tl.maximum(decay, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(decay)))
        learnt = _sigmoid(tl.load(gate_row + value_heads).to(tl.float32))
        state = state * tl.exp(-rate * softplus)
        new = (new - tl.sum(state * known[:, None], axis=0)) * learnt
        state = tl.fma(known[:, None], new[None, :], state)
        found = tl.sum(state * query[:, None], axis=0)
        tl.store(out + (row * value_heads + head) * value_size + value, found, mask=is_value)
    tl.store(tile, state, mask=is_inside)


@triton.jit
def _gated_norm_kernel(
    heads, gate, scale, out, gate_stride, value_heads, epsilon,
    value_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one head of one row, times scale · gate · sigmoid(gate)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < value_size
    start = (row * value_heads + head) * value_size + at
    value = tl.load(heads + start, mask=inside, other=0.0)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / value_size + epsilon)
    value *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    gates = gate + row * gate_stride + head * value_size + at
    own = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start, (value * own * _sigmoid(own)).to(out.dtype.element_ty), mask=inside)


def linear_attention(
    mixed: Tensor,
    gates: Tensor,
    states: tuple[Tensor, Tensor],
    *,
    convolution: Tensor,
    decay_bias: Tensor,
    decay_rate: Tensor,
    scale: Tensor,
    key_heads: int,
    epsilon: float,
    slots: Tensor,
    sequences: Tensor,
    starts: Tensor,
    max_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """mixed [rows, c + value_heads · value_size], channels and gate; gates [rows, 2 · value_heads],
    decay and beta → [rows, value_heads · value_size] of mixed's type.

    states float32, changed in place: [slots, width − 1, c] and [slots, value_heads, key_size,
    value_size]. convolution [c, width]; decay_bias, decay_rate [value_heads]; scale [value_size].
    slots, sequences, starts and max_tokens as for `causal_convolution`. Raises ValueError.
    """
    seen_last, heads_states = states
    check("mixed", mixed, dtypes=FLOATS, shape=(None, None))
    check(
        "states[1]", heads_states, dtypes=(torch.float32,), shape=(None, None, None, None),
        like=mixed,
    )  # fmt: skip
    rows = mixed.shape[0]
    value_heads, key_size, value_size = heads_states.shape[1:]
    channels, values = seen_last.shape[-1], value_heads * value_size
    if key_heads < 1 or value_heads % key_heads or channels != 2 * key_heads * key_size + values:
        raise ValueError(
            f"{channels} channels are not {key_heads} queries and keys of {key_size}, and "
            f"{value_heads} values of {value_size}"
        )
    if mixed.shape[1] != channels + values:
        raise ValueError(f"mixed has {mixed.shape[1]} columns, not {channels} and {values}")
    check("gates", gates, dtypes=FLOATS, shape=(rows, 2 * value_heads), like=mixed)
    for name, vector, size in (
        ("decay_bias", decay_bias, value_heads),
        ("decay_rate", decay_rate, value_heads),
        ("scale", scale, value_size),
    ):
        check(name, vector, dtypes=FLOATS, shape=(size,), like=mixed)
    check("slots", slots, dtypes=INTEGERS, shape=(None,), like=mixed)
    out = output("out", out, shape=(rows, values), like=mixed)
    if not rows:
        return out
    seen = causal_convolution(
        mixed, seen_last, convolution,
        slots=slots, sequences=sequences, starts=starts, max_tokens=max_tokens,
    )  # fmt: skip
    heads = torch.empty(rows, values, dtype=torch.float32, device=mixed.device)
    keys = padded(key_size)
    block = min(padded(value_size), max(1, _TILE // keys))
    options = {**Launch(num_stages=1).options(), "enable_fp_fusion": False}
    _delta_kernel[slots.shape[0], value_heads, triton.cdiv(value_size, block)](
        seen, gates, heads_states, decay_bias, decay_rate, slots, starts, heads, key_heads,
        value_heads, key_size**-0.5, LENGTH_EPSILON,
        key_size=key_size, value_size=value_size, keys=keys, values=block, **options,
    )  # fmt: skip
    gate = mixed[:, channels:]
    _gated_norm_kernel[rows, value_heads](
        heads, gate, scale, out, gate.stride(0), value_heads, epsilon,
        value_size=value_size, block=padded(value_size),
        **Launch(num_warps=1, num_stages=1).options(),
    )  # fmt: skip
    return out
