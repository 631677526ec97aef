"""Logits scaled and capped on a GPU, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, Launch, check

_BLOCK = 1024


@triton.jit
def _finish_kernel(x, count, scale, soft_cap, caps: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    if caps:
        # tanh(z) = sign(z) · (1 − e^−2|z|) / (1 + e^−2|z|): nothing overflows.
        z = y / soft_cap
        small = tl.exp(-2.0 * tl.abs(z))
        bent = soft_cap * (1.0 - small) / (1.0 + small)
        y = tl.where(z < 0, -bent, bent)
    tl.store(x + at, y.to(x.dtype.element_ty), mask=inside)


def finish_logits(x: Tensor, *, scale: float, soft_cap: float | None) -> Tensor:
    """x [..., n], contiguous → x itself, changed. Raises ValueError."""
    check("x", x, dtypes=FLOATS)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, not above 0")
    count = x.numel()
    if count and (scale != 1.0 or soft_cap is not None):
        options = Launch(num_stages=1).options()
        _finish_kernel[(triton.cdiv(count, _BLOCK),)](
            x, count, scale, soft_cap or 1.0, caps=soft_cap is not None, block=_BLOCK, **options
        )
    return x
