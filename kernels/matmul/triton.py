"""Product with a float weight on a GPU: read once for few rows, in tiles of tl.dot for many.

Sums are float32. Where the inputs are divided among programs, their parts are summed in one order,
so that the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import (
    FLOATS,
    GemmTiles,
    GemvTiles,
    Launch,
    check,
    gemm_tiles,
    gemv_tiles,
    num_processors,
    output,
)

FEW_ROWS = 4
"""Up to here a product is bound by reading the weight, and tl.dot would waste 3 of 4 rows."""

_SUM_BLOCK = 1024


@triton.jit
def store_row(out, sums, bias, n, num_outputs, biased: tl.constexpr):
    """One row of a product: the sums [outputs, n] over their last axis (+ bias)."""
    result = tl.sum(sums, axis=1)
    if biased:
        result += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < num_outputs)


@triton.jit
def store_rows(
    out, sums_0, sums_1, sums_2, sums_3, bias, n, num_outputs,
    num_rows: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    """Up to four rows of a product, one below the other."""
    store_row(out, sums_0, bias, n, num_outputs, biased)
    if num_rows > 1:
        store_row(out + num_outputs, sums_1, bias, n, num_outputs, biased)
    if num_rows > 2:
        store_row(out + 2 * num_outputs, sums_2, bias, n, num_outputs, biased)
    if num_rows > 3:
        store_row(out + 3 * num_outputs, sums_3, bias, n, num_outputs, biased)


@triton.jit
def _load_row(x, k, num_inputs):
    return tl.load(x + k, mask=k < num_inputs, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gemv_kernel(
    x, weight, bias, out, num_outputs, num_inputs, num_rows: tl.constexpr,
    biased: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """All rows of x, at most four, times `block_outputs` rows of the weight.

    Each row has sums of its own: one more axis would send the weight through shared memory.
    """
    n = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    weight_row = (n.to(tl.int64) * num_inputs)[:, None]
    sums_0 = tl.zeros((block_outputs, block_inputs), dtype=tl.float32)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    for first in range(0, num_inputs, block_inputs):
        k = first + tl.arange(0, block_inputs)
        inside = (n < num_outputs)[:, None] & (k < num_inputs)[None, :]
        w = tl.load(weight + weight_row + k[None, :], mask=inside, other=0.0).to(tl.float32)
        sums_0 += w * _load_row(x, k, num_inputs)
        if num_rows > 1:
            sums_1 += w * _load_row(x + num_inputs, k, num_inputs)
        if num_rows > 2:
            sums_2 += w * _load_row(x + 2 * num_inputs, k, num_inputs)
        if num_rows > 3:
            sums_3 += w * _load_row(x + 3 * num_inputs, k, num_inputs)
    store_rows(
        out, sums_0, sums_1, sums_2, sums_3, bias, n, num_outputs, num_rows, biased
    )  # fmt: skip


@triton.jit
def _gemm_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs, split_inputs,
    biased: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
):  # fmt: skip
    """One tile of the product of the inputs of program axis 2, into that axis of `out`."""
    m = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    n = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    split = tl.program_id(2)
    m_inside, n_inside = m < num_rows, n < num_outputs
    x_row, weight_row = m.to(tl.int64) * num_inputs, n.to(tl.int64) * num_inputs
    begin = split * split_inputs
    sums = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
    for first in range(begin, tl.minimum(begin + split_inputs, num_inputs), block_inputs):
        k = first + tl.arange(0, block_inputs)
        k_inside = k < num_inputs
        a = tl.load(
            x + x_row[:, None] + k[None, :],
            mask=m_inside[:, None] & k_inside[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight + weight_row[None, :] + k[:, None],
            mask=n_inside[None, :] & k_inside[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(a, w.to(a.dtype), sums, input_precision="ieee")
    if biased:
        sums += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * num_rows + m.to(tl.int64)) * num_outputs
    tl.store(
        out + place[:, None] + n[None, :], sums.to(out.dtype.element_ty),
        mask=m_inside[:, None] & n_inside[None, :],
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    parts, bias, out, count, num_outputs, splits, biased: tl.constexpr, block: tl.constexpr
):
    """out = the sum of the parts (+ bias), in the order of the splits."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.zeros((block,), dtype=tl.float32)
    part = parts + at
    for _ in range(splits):
        total += tl.load(part, mask=inside, other=0.0)
        part += count
    if biased:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tiles: GemvTiles | GemmTiles | None = None,
) -> Tensor:
    """x [..., inputs], weight [outputs, inputs], bias [outputs] → [..., outputs].

    The result has the type of x unless `out` has another. The kind of `tiles` chooses the kernel;
    without them the number of rows does. Raises ValueError.
    """
    check("x", x, dtypes=FLOATS)
    check("weight", weight, dtypes=FLOATS, shape=(None, None), like=x)
    num_outputs, num_inputs = weight.shape
    if not x.ndim or x.shape[-1] != num_inputs:
        raise ValueError(f"x has the shape {list(x.shape)}, the weight {num_inputs} inputs")
    check_bias(bias, num_outputs, x)
    out = output("out", out, shape=(*x.shape[:-1], num_outputs), like=x)
    if not out.numel():
        return out
    rows = out.numel() // num_outputs
    tiles = tiles or usual_tiles(x, rows, num_outputs, gemv_inputs=512)
    if isinstance(tiles, GemvTiles):
        _gemv_kernel[(triton.cdiv(num_outputs, tiles.outputs),)](
            x, weight, x if bias is None else bias, out, num_outputs, num_inputs, num_rows=rows,
            biased=bias is not None, block_outputs=tiles.outputs, block_inputs=tiles.inputs,
            **tiles.launch.options(),
        )  # fmt: skip
        return out
    target, target_bias = split_output(out, bias, tiles.splits)
    split_inputs = triton.cdiv(triton.cdiv(num_inputs, tiles.splits), tiles.inputs) * tiles.inputs
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), tiles.splits)
    _gemm_kernel[grid](
        x, weight, x if target_bias is None else target_bias, target,
        rows, num_outputs, num_inputs, split_inputs, biased=target_bias is not None,
        block_rows=tiles.rows, block_outputs=tiles.outputs, block_inputs=tiles.inputs,
        **tiles.launch.options(),
    )  # fmt: skip
    if tiles.splits > 1:
        sum_splits(target, bias, out)
    return out


def usual_tiles(x: Tensor, rows: int, outputs: int, *, gemv_inputs: int) -> GemvTiles | GemmTiles:
    """Tiles for x [..., inputs] of that many rows; gemv_inputs: at a time, for few rows."""
    processors = num_processors(x.device)
    if rows <= FEW_ROWS:
        return gemv_tiles(outputs, inputs=gemv_inputs, processors=processors)
    size = x.element_size()
    return gemm_tiles(rows, outputs, x.shape[-1], element_bytes=size, processors=processors)


def check_bias(bias: Tensor | None, num_outputs: int, like: Tensor) -> None:
    if bias is not None:
        check("bias", bias, dtypes=FLOATS, shape=(num_outputs,), like=like)


def split_output(out: Tensor, bias: Tensor | None, splits: int) -> tuple[Tensor, Tensor | None]:
    """The buffer that the parts of a product are written to, and the bias to add there."""
    if splits == 1:
        return out, bias
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device), None


def sum_splits(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [..., outputs] = the sum of parts [splits, ..., outputs] (+ bias [outputs])."""
    count = out.numel()
    _sum_kernel[(triton.cdiv(count, _SUM_BLOCK),)](
        parts, out if bias is None else bias, out, count, out.shape[-1], parts.shape[0],
        biased=bias is not None, block=_SUM_BLOCK, **Launch(num_stages=1).options(),
    )  # fmt: skip
