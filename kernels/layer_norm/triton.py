"""LayerNorm on a GPU, with or without the residual addition before it: one pass over memory.

A program holds one row in registers. Every sum is float32, that of squares without the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import norm_rows, norm_sums


@triton.jit
def _layer_norm_kernel(
    x, addend, weight, bias, out, total, columns, epsilon, adds: tl.constexpr, block: tl.constexpr
):
    """s = x (+ addend, rounded as it is stored), c = s − mean(s);
    out = c / sqrt(mean(c²) + ε) · w + b."""
    at = tl.arange(0, block)
    inside = at < columns
    row = tl.program_id(0).to(tl.int64) * columns + at
    value = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(addend + row, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row, stored, mask=inside)
        value = stored.to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, axis=0) / columns, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, (value * scale * gain + shift).to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epsilon: float,
    out: Tensor | None = None,
) -> Tensor:
    """x [..., n]; weight, bias [n] → [..., n] of x's type. `out` may be x. Raises ValueError."""
    return norm_rows(_layer_norm_kernel, x, epsilon=epsilon, out=out, weight=weight, bias=bias)


def add_layer_norm(
    x: Tensor,
    addend: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epsilon: float,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + addend, rounded to x's type; returns (layer_norm(s), s).

    x, addend [..., n]; weight, bias [n]. `total` may be x or addend: the residual stream stays in
    place. Raises ValueError.
    """
    return norm_sums(
        _layer_norm_kernel,
        x,
        addend,
        epsilon=epsilon,
        out=out,
        total=total,
        weight=weight,
        bias=bias,
    )
