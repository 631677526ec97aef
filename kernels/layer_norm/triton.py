"""LayerNorm on a GPU, with or without the residual addition before it: one pass over memory.

A program holds one row in registers. Every sum is float32, that of squares without the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import (
    FLOATS,
    added_outputs,
    check,
    check_rows,
    output,
    padded,
    row_launch,
)


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
    _check_rows(x, weight, bias)
    out = output("out", out, shape=x.shape, like=x)
    _run(x, x, weight, bias, out, out, epsilon=epsilon, adds=False)
    return out


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
    _check_rows(x, weight, bias)
    out, total = added_outputs(x, addend, out, total)
    _run(x, addend, weight, bias, out, total, epsilon=epsilon, adds=True)
    return out, total


def _check_rows(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    check_rows(x)
    for name, vector in (("weight", weight), ("bias", bias)):
        check(name, vector, dtypes=FLOATS, shape=x.shape[-1:], like=x)


def _run(
    x: Tensor,
    addend: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    total: Tensor,
    *,
    epsilon: float,
    adds: bool,
) -> None:
    columns = x.shape[-1]
    rows = x.numel() // columns
    if not rows:
        return
    block = padded(columns)
    options = row_launch(block).options()
    _layer_norm_kernel[(rows,)](
        x, addend, weight, bias, out, total, columns, epsilon, adds=adds, block=block, **options
    )
