"""A causal convolution of each channel over a few last tokens on a GPU, with a state in place.

What a token sees is the tokens before it of its own sequence, in the same step as far as they are
there, else in the state: that holds what the convolution saw last. Where each sequence has one
token, the program that has read the state shifts it; else that is a second launch, because others
read it as well. The sum over the taps is the same in both, float32: with products that are rounded
before they are added, for of a fused pair it would matter which thread adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, INTEGERS, Launch, check, output, padded

_LARGEST_BLOCK = 128
_TILE = 1024


@triton.jit
def _seen(
    mixed, state, first, token, at, inside, stride, channels, width,
    gated: tl.constexpr, taps: tl.constexpr,
):  # fmt: skip
    """[taps, channels]: what is seen of the tokens up to this one of the sequence, from row `first`
    on; `state` is that sequence's."""
    tap = tl.arange(0, taps)[:, None]
    place = token - (width - 1) + tap
    is_tap = (tap < width) & inside[None, :]
    is_old = is_tap & (place < 0) & (place + width > 0)
    old = tl.load(state + (place + width - 1) * channels + at[None, :], mask=is_old, other=0.0)
    is_new = is_tap & (place >= 0)
    start = mixed + (first + place) * stride + at[None, :]
    new = tl.load(start, mask=is_new, other=0.0).to(tl.float32)
    if gated:
        new *= tl.load(start + 2 * channels, mask=is_new, other=0.0).to(tl.float32)
    return tl.where(place < 0, old, new)


@triton.jit
def _shift(state, seen, at, inside, channels, width, taps: tl.constexpr):
    """Write the last inputs to the state."""
    tl.debug_barrier()  # all of the state was read
    tap = tl.arange(0, taps)[:, None]
    kept = (tap > 0) & (tap < width) & inside[None, :]
    tl.store(state + (tap - 1) * channels + at[None, :], seen, mask=kept)


@triton.jit
def _convolution_kernel(
    mixed, states, weights, bias, slots, sequences, starts, out, stride, channels, width,
    gated: tl.constexpr, has_bias: tl.constexpr, shifts: tl.constexpr, taps: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Some channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    sequence = tl.load(sequences + row)
    first = tl.load(starts + sequence).to(tl.int64)
    state = states + tl.load(slots + sequence).to(tl.int64) * (width - 1) * channels
    seen = _seen(mixed, state, first, row - first, at, inside, stride, channels, width, gated, taps)
    tap = tl.arange(0, taps)[:, None]
    weight = tl.load(
        weights + at[None, :] * width + tap, mask=(tap < width) & inside[None, :], other=0.0
    )
    total = tl.sum(seen * weight.to(tl.float32), axis=0)
    if has_bias:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if gated:
        after = tl.load(mixed + row * stride + channels + at, mask=inside, other=0.0)
        total *= after.to(tl.float32)
    else:
        small = tl.exp(-tl.abs(total))
        total *= tl.where(total >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * channels + at, total.to(out.dtype.element_ty), mask=inside)
    if shifts:
        _shift(state, seen, at, inside, channels, width, taps)


@triton.jit
def _state_kernel(
    mixed, states, slots, starts, stride, channels, width,
    gated: tl.constexpr, taps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Some channels of one sequence's state."""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    first = tl.load(starts + sequence).to(tl.int64)
    last = tl.load(starts + sequence + 1).to(tl.int64) - 1
    state = states + tl.load(slots + sequence).to(tl.int64) * (width - 1) * channels
    seen = _seen(
        mixed, state, first, last - first, at, inside, stride, channels, width, gated, taps
    )
    _shift(state, seen, at, inside, channels, width, taps)


def short_convolution(
    mixed: Tensor,
    states: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    slots: Tensor,
    sequences: Tensor,
    starts: Tensor,
    max_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """mixed [rows, 3 · channels]: before, after and x → [rows, channels] of its type.

    The rest is as for `causal_convolution`.
    """
    check("mixed", mixed, dtypes=FLOATS, shape=(None, None))
    channels = states.shape[-1]
    if mixed.shape[1] != 3 * channels:
        raise ValueError(f"mixed has {mixed.shape[1]} columns, not three for {channels} channels")
    out = output("out", out, shape=(mixed.shape[0], channels), like=mixed)
    _run(
        mixed,
        states,
        weights,
        bias,
        slots,
        sequences,
        starts,
        max_tokens,
        out,
        gated=True,
    )
    return out


def causal_convolution(
    x: Tensor,
    states: Tensor,
    weights: Tensor,
    *,
    slots: Tensor,
    sequences: Tensor,
    starts: Tensor,
    max_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """c · sigmoid(c) of x's convolution c; x [rows, channels or more] → float32 [rows, channels].

    states float32 [slots, width − 1, channels], changed in place; weights [channels, width], the
    last of them the token's own. Sequence i has rows starts[i] … starts[i + 1] − 1 and the state
    slots[i], which no other has: at most `max_tokens` rows. sequences int32 [rows] tells whose each
    row is. Raises ValueError.
    """
    check("x", x, dtypes=FLOATS, shape=(None, None), contiguous=False)
    channels = states.shape[-1]
    if x.shape[1] < channels or x.stride(1) != 1:
        raise ValueError(f"x has {x.shape[1]} columns side by side, not {channels} channels")
    shape = (x.shape[0], channels)
    out = output("out", out, shape=shape, like=x, dtype=torch.float32, dtypes=(torch.float32,))
    _run(
        x,
        states,
        weights,
        None,
        slots,
        sequences,
        starts,
        max_tokens,
        out,
        gated=False,
    )
    return out


def _run(
    mixed: Tensor,
    states: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    sequences: Tensor,
    starts: Tensor,
    max_tokens: int,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    rows = mixed.shape[0]
    check("states", states, dtypes=(torch.float32,), shape=(None, None, None), like=mixed)
    width, channels = states.shape[1] + 1, states.shape[2]
    check("weights", weights, dtypes=FLOATS, shape=(channels, width), like=mixed)
    if bias is not None:
        check("bias", bias, dtypes=FLOATS, shape=(channels,), like=mixed)
    check("slots", slots, dtypes=INTEGERS, shape=(None,), like=mixed)
    batch = slots.shape[0]
    check("sequences", sequences, dtypes=INTEGERS, shape=(rows,), like=mixed)
    check("starts", starts, dtypes=INTEGERS, shape=(batch + 1,), like=mixed)
    if not rows:
        return
    taps = padded(width)
    block = min(padded(channels), max(1, min(_LARGEST_BLOCK, _TILE // taps)))
    blocks = triton.cdiv(channels, block)
    options = {**Launch(num_warps=1, num_stages=1).options(), "enable_fp_fusion": False}
    _convolution_kernel[rows, blocks](
        mixed, states, weights, weights if bias is None else bias, slots, sequences, starts, out,
        mixed.stride(0), channels, width, gated=gated, has_bias=bias is not None,
        shifts=max_tokens == 1, taps=taps, block=block, **options,
    )  # fmt: skip
    if max_tokens > 1:
        _state_kernel[batch, blocks](
            mixed, states, slots, starts, mixed.stride(0), channels, width,
            gated=gated, taps=taps, block=block, **options,
        )  # fmt: skip
