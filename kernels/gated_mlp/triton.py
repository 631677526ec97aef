"""activation(gate) · up on a GPU, of one fused gate and up product, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.activation.reference import Activation
from edge.kernels.activation.triton import activate, check_activation, sigmoid
from edge.kernels.gated_mlp.reference import Clamp
from edge.kernels.triton_launch import FLOATS, Launch, check, output, padded

_LARGEST_BLOCK = 1024


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
        active = activate(gate, activation)
    tl.store(out + row * columns + at, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(
    gate_up: Tensor,
    *,
    activation: Activation = "silu",
    clamp: Clamp | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """gate_up [..., 2n], gate first → [..., n] of the same type. Only silu is clamped.

    Raises ValueError.
    """
    check("gate_up", gate_up, dtypes=FLOATS)
    if not gate_up.ndim or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up holds two halves, so {list(gate_up.shape)} cannot be its shape")
    check_activation(activation)
    if clamp is not None and activation != "silu":
        raise ValueError(f"{activation} is not clamped, only silu is")
    columns = gate_up.shape[-1] // 2
    out = output("out", out, shape=(*gate_up.shape[:-1], columns), like=gate_up)
    if not out.numel():
        return out
    block = min(padded(columns), _LARGEST_BLOCK)
    options = Launch(num_stages=1).options()
    grid = (out.numel() // columns, triton.cdiv(columns, block))
    limit, slope = (1.0, 1.0) if clamp is None else (float(clamp.limit), float(clamp.slope))
    _gated_kernel[grid](
        gate_up, out, columns, limit, slope,
        activation=activation, clamped=clamp is not None, block=block, **options,
    )  # fmt: skip
    return out
