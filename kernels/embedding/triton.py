"""Row look-up on a GPU, also in a slice of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, INTEGERS, Launch, check, output, padded

_LARGEST_BLOCK = 2048


@triton.jit
def _embedding_kernel(token_ids, table, out, first_id, num_ids, hidden, block: tl.constexpr):
    """out[t] = table[token_ids[t] − first_id], or zeros where that is no row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    local = tl.load(token_ids + token).to(tl.int64) - first_id
    known = tl.where((local >= 0) & (local < num_ids), hidden, 0)
    row = tl.load(table + local * hidden + at, mask=at < known, other=0.0)
    tl.store(out + token * hidden + at, row.to(out.dtype.element_ty), mask=at < hidden)


def embedding(
    token_ids: Tensor,
    table: Tensor,
    *,
    first_id: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """token_ids int [...], table [ids, hidden] for ids first_id … → [..., hidden].

    Ids outside the slice give zeros, so that slices sum to the whole. The result has the table's
    type unless `out` has another. Raises ValueError.
    """
    check("token_ids", token_ids, dtypes=INTEGERS)
    check("table", table, dtypes=FLOATS, shape=(None, None), like=token_ids)
    num_ids, hidden = table.shape
    out = output("out", out, shape=(*token_ids.shape, hidden), like=table)
    if not out.numel():
        return out
    block = min(padded(hidden), _LARGEST_BLOCK)
    options = Launch(num_stages=1).options()
    grid = (token_ids.numel(), triton.cdiv(hidden, block))
    _embedding_kernel[grid](
        token_ids, table, out, first_id, num_ids, hidden, block=block, **options
    )
    return out
