"""activation(gate) · up on a GPU, of one fused gate and up product, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.gated_mlp.reference import ACTIVATIONS, Activation
from edge.kernels.triton_launch import FLOATS, Launch, check, output, padded

_LARGEST_BLOCK = 1024


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^−x), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated_kernel(gate_up, out, columns, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    start = gate_up + row * 2 * columns + at
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    if activation == "silu":
        active = gate * _sigmoid(gate)
    elif activation == "gelu":
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(z)) = sigmoid(2z)
        active = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * columns + at, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(
    gate_up: Tensor,
    *,
    activation: Activation = "silu",
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """gate_up [..., 2n], gate first → [..., n] of the same type. Raises ValueError."""
    check("gate_up", gate_up, dtypes=FLOATS)
    if not gate_up.ndim or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up holds two halves, so {list(gate_up.shape)} cannot be its shape")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    columns = gate_up.shape[-1] // 2
    out = output("out", out, shape=(*gate_up.shape[:-1], columns), like=gate_up)
    if not out.numel():
        return out
    block = min(padded(columns), _LARGEST_BLOCK)
    options = (launch or Launch(num_stages=1)).options()
    grid = (out.numel() // columns, triton.cdiv(columns, block))
    _gated_kernel[grid](gate_up, out, columns, activation=activation, block=block, **options)
    return out
