"""A layer's own inputs of each token on a GPU: one pass over memory. See the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, check, output, padded, row_launch


@triton.jit
def _inputs_kernel(
    product, rows, norm, out, rows_stride, size, product_scale, rows_scale, epsilon,
    block: tl.constexpr,
):  # fmt: skip
    """(rms_norm(product · product_scale) + row · rows_scale) / √2 of one token."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = at < size
    made = tl.load(product + row * size + at, mask=inside, other=0.0).to(tl.float32)
    made *= product_scale
    made *= 1.0 / tl.sqrt(tl.sum(made * made, axis=0) / size + epsilon)
    made *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(rows + row * rows_stride + at, mask=inside, other=0.0).to(tl.float32)
    found = (made + own * rows_scale) * 0.7071067811865476
    tl.store(out + row * size + at, found.to(out.dtype.element_ty), mask=inside)


def token_inputs(
    product: Tensor,
    rows: Tensor,
    norm: Tensor,
    *,
    hidden_size: int,
    epsilon: float,
    out: Tensor | None = None,
) -> Tensor:
    """product [tokens, n]; rows [tokens, n], which may lie apart; norm [n] → like product.

    product: of an embedding of hidden_size. Raises ValueError.
    """
    check("product", product, dtypes=FLOATS, shape=(None, None))
    tokens, size = product.shape
    check("rows", rows, dtypes=FLOATS, shape=product.shape, like=product, contiguous=False)
    check("norm", norm, dtypes=FLOATS, shape=(size,), like=product)
    out = output("out", out, shape=product.shape, like=product)
    if not out.numel():
        return out
    block = padded(size)
    _inputs_kernel[(tokens,)](
        product, rows, norm, out, rows.stride(0), size, hidden_size**-0.5, size**0.5, epsilon,
        block=block, **row_launch(block).options(),
    )  # fmt: skip
    return out
