"""The activation between two products on a GPU: alone, and for kernels that do more with it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.activation.reference import ACTIVATIONS, Activation
from edge.kernels.triton_launch import FLOATS, Launch, check, output, padded

_LARGEST_BLOCK = 1024


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activate(x, activation: tl.constexpr):
    """float32 → like x."""
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
    tl.store(out + at, activate(value, activation).to(out.dtype.element_ty), mask=inside)


def activated(
    x: Tensor,
    *,
    activation: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """x [...] → like x. `out` may be x. Raises ValueError."""
    check("x", x, dtypes=FLOATS)
    check_activation(activation)
    out = output("out", out, shape=x.shape, like=x)
    if not out.numel():
        return out
    block = min(padded(x.numel()), _LARGEST_BLOCK)
    options = Launch(num_stages=1).options()
    grid = (triton.cdiv(x.numel(), block),)
    _activated_kernel[grid](x, out, x.numel(), activation=activation, block=block, **options)
    return out


def check_activation(activation: Activation) -> None:
    """Raises ValueError for what `activate` does not have."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
