"""activation(gate) · up on a GPU, of one fused gate and up product, in one pass over memory; and
the activation alone, for blocks without gates."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.gated_mlp.reference import ACTIVATIONS, Activation, Clamp
from edge.kernels.triton_launch import FLOATS, Launch, check, output, padded

_LARGEST_BLOCK = 1024


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _activated(x, activation: tl.constexpr):
    if activation == "silu":
        active = x * sigmoid(x)
    elif activation == "gelu":
        active = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(z)) = sigmoid(2z)
        active = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return active


@triton.jit
def _activated_kernel(x, out, count, activation: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, _activated(value, activation).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    gate_up, out, columns, limit, slope,
    activation: tl.constexpr, clamped: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    start = gate_up + row * 2 * columns + at
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    if clamped:
        active = tl.minimum(gate, limit)
        active *= sigmoid(slope * active)
        up = 1.0 + tl.minimum(tl.maximum(up, -limit), limit)
    else:
        active = _activated(gate, activation)
    tl.store(out + row * columns + at, (active * up).to(out.dtype.element_ty), mask=inside)


def activated(
    x: Tensor,
    *,
    activation: Activation,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """x [...] → like x. `out` may be x. Raises ValueError."""
    check("x", x, dtypes=FLOATS)
    _check_activation(activation)
    out = output("out", out, shape=x.shape, like=x)
    if not out.numel():
        return out
    block = min(padded(x.numel()), _LARGEST_BLOCK)
    options = (launch or Launch(num_stages=1)).options()
    grid = (triton.cdiv(x.numel(), block),)
    _activated_kernel[grid](x, out, x.numel(), activation=activation, block=block, **options)
    return out


def gated(
    gate_up: Tensor,
    *,
    activation: Activation = "silu",
    clamp: Clamp | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """gate_up [..., 2n], gate first → [..., n] of the same type. Only silu is clamped.

    Raises ValueError.
    """
    check("gate_up", gate_up, dtypes=FLOATS)
    if not gate_up.ndim or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up holds two halves, so {list(gate_up.shape)} cannot be its shape")
    _check_activation(activation)
    if clamp is not None and activation != "silu":
        raise ValueError(f"{activation} is not clamped, only silu is")
    columns = gate_up.shape[-1] // 2
    out = output("out", out, shape=(*gate_up.shape[:-1], columns), like=gate_up)
    if not out.numel():
        return out
    block = min(padded(columns), _LARGEST_BLOCK)
    options = (launch or Launch(num_stages=1)).options()
    grid = (out.numel() // columns, triton.cdiv(columns, block))
    limit, slope = (1.0, 1.0) if clamp is None else (float(clamp.limit), float(clamp.slope))
    _gated_kernel[grid](
        gate_up, out, columns, limit, slope,
        activation=activation, clamped=clamp is not None, block=block, **options,
    )  # fmt: skip
    return out


def _check_activation(activation: Activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
