"""Keys and values of heads on a GPU, from what all of them share: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, Launch, check, output, padded


@triton.jit
def _heads_kernel(
    product, shared, out, shared_stride, out_stride, num_heads,
    own_size: tl.constexpr, shared_size: tl.constexpr, value_size: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """The key and the value of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = shared_size + own_size
    at = tl.arange(0, block)
    start = product + row * num_heads * (own_size + value_size)
    own_at = at - shared_size
    is_own = (own_at >= 0) & (own_at < own_size)
    own = tl.load(start + head * own_size + own_at, mask=is_own, other=0.0)
    turned = tl.load(shared + row * shared_stride + at, mask=at < shared_size, other=0.0)
    place = out + row * out_stride + head * size + at
    tl.store(place, tl.where(at < shared_size, turned, own), mask=at < size)
    values = start + num_heads * own_size + head * value_size
    value = tl.load(values + at, mask=at < value_size, other=0.0)
    tl.store(place + num_heads * size, value, mask=at < size)


def latent_heads(
    product: Tensor,
    shared: Tensor,
    *,
    num_heads: int,
    own_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """product [rows, num_heads · (own_size + value_size)], keys first; shared [rows, n], which may
    be a slice → keys, then values [rows, 2 · num_heads · (n + own_size)], values filled up with
    zeros. `out` may be a slice. Raises ValueError.
    """
    check("product", product, dtypes=FLOATS, shape=(None, None))
    rows, columns = product.shape
    check(
        "shared", shared, dtypes=(product.dtype,), shape=(rows, None), like=product,
        contiguous=False,
    )  # fmt: skip
    shared_size = shared.shape[1]
    size, value_size = shared_size + own_size, columns // num_heads - own_size
    if columns % num_heads or own_size < 0 or not 0 < value_size <= size:
        raise ValueError(
            f"product has {columns} columns, not {num_heads} keys of {own_size} and values of up "
            f"to {size}"
        )
    shape = (rows, 2 * num_heads * size)
    if out is None:
        out = output("out", None, shape=shape, like=product)
    check("out", out, dtypes=FLOATS, shape=shape, like=product, contiguous=False)
    if not rows:
        return out
    _heads_kernel[rows, num_heads](
        product, shared, out, shared.stride(0), out.stride(0), num_heads,
        own_size=own_size, shared_size=shared_size, value_size=value_size, block=padded(size),
        **Launch(num_warps=1, num_stages=1).options(),
    )  # fmt: skip
    return out
