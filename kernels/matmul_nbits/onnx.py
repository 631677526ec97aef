"""Product with a weight of 2, 4 or 8 bits in blocks, on ONNX Runtime's integer path."""

from __future__ import annotations

import numpy as np

from edge.kernels.matmul.onnx import matmul
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph

INTEGER_ACTIVATIONS = 4
"""accuracy_level: the activation is rounded to int8 per block; 4 to 100 times faster than 0."""

FLOAT_ACTIVATIONS = 0
"""accuracy_level: the activation is not rounded."""

_LARGEST_CODE = 127
_SMALLEST_PEAK = np.float32(1e-30)
"""Stands in for the peak of a block of zeros, so that nothing is divided by 0."""


def matmul_nbits(
    graph: OnnxGraph,
    x: str,
    codes: str,
    scales: str,
    zero_points: str | None = None,
    offsets: str | None = None,
    *,
    rows: int,
    columns: int,
    bits: int,
    block_size: int,
    accuracy: Accuracy = "fast",
) -> str:
    """x [batch, tokens, columns], codes, scales and offsets as in reference.py → [..., rows].

    zero_points: as `pack_zero_points` makes them.

    W is the weight that codes and scales stand for, and Q rounds each block of x to the codes
    −127…127 of its own scale, its peak / 127, as the operator itself does:

        fast: y = Q(x) Wᵀ
        high: y = Q(x) Wᵀ + Q(x − Q(x)) Wᵀ

    On WebGPU, "high" does not round x.

    The operator finds Q(x) rounded already and keeps it, so what "high" loses is the rounding of
    the remainders: 2e-5 of the product's norm on normal x and W, "fast" 5e-3. Both terms are rows
    of one product, which costs less than two products: against "fast", 1.3 to 1.9 times as long for
    one token (0.60 ms for 0.38 ms with 4096 x 4096 in int4, 0.34 for 0.25 with 9728 x 896 in int8)
    and 2.0 to 2.2 times for 128 (one thread, AMD EPYC with AVX-512 VNNI, blocks of 32).
    """
    in_blocks = None if offsets is None else block_sums(graph, x, columns, block_size)
    level = INTEGER_ACTIVATIONS
    if accuracy == "high" and graph.provider.is_webgpu:
        level, accuracy = FLOAT_ACTIVATIONS, "fast"
    if accuracy == "high":
        x = _with_remainders(graph, x, columns=columns, block_size=block_size)
        columns += -columns % block_size
    y = graph.node(
        "MatMulNBits", x, codes, scales, *([] if zero_points is None else [zero_points]),
        domain=CONTRIB, K=columns, N=rows, bits=bits, block_size=block_size,
        accuracy_level=level,
    )  # fmt: skip
    if accuracy == "high":
        y = graph.node("Add", *graph.nodes("Split", y, outputs=2, axis=1))
    if offsets is None or in_blocks is None:
        return y
    return graph.node("Add", y, matmul(graph, in_blocks, offsets))


def block_sums(graph: OnnxGraph, x: str, columns: int, block_size: int) -> str:
    """x [batch, tokens, columns] → [batch, tokens, blocks]: what offsets are multiplied with."""
    x = _whole_blocks(graph, x, columns, block_size)
    shape = graph.constant(f"blocks_of_{block_size}", np.asarray([0, 0, -1, block_size]))
    last = graph.constant("last_axis", np.asarray([-1]))
    return graph.node("ReduceSum", graph.node("Reshape", x, shape), last, keepdims=0)


def _whole_blocks(graph: OnnxGraph, x: str, columns: int, block_size: int) -> str:
    missing = -columns % block_size
    if not missing:
        return x
    pads = graph.constant(f"pad_right_{missing}", np.asarray([0, 0, 0, 0, 0, missing]))
    return graph.node("Pad", x, pads)


def _with_remainders(graph: OnnxGraph, x: str, *, columns: int, block_size: int) -> str:
    """x [batch, tokens, columns] → [batch, 2 tokens, whole blocks]: Q(x), then x − Q(x)."""
    x = _whole_blocks(graph, x, columns, block_size)
    in_blocks = graph.constant(f"blocks_of_{block_size}", np.asarray([0, 0, -1, block_size]))
    blocks = graph.node("Reshape", x, in_blocks)
    peak = graph.node("ReduceMax", graph.node("Abs", blocks), axes=[-1], keepdims=1)
    peak = graph.node("Max", peak, graph.constant("smallest_peak", np.asarray(_SMALLEST_PEAK)))
    step = graph.constant("code_step", np.asarray(1 / _LARGEST_CODE, np.float32))
    scale = graph.node("Mul", peak, step)
    rounded = graph.node("Mul", graph.node("Round", graph.node("Div", blocks, scale)), scale)
    both = graph.node("Concat", rounded, graph.node("Sub", blocks, rounded), axis=1)
    return graph.node("Reshape", both, graph.constant("joined_blocks", np.asarray([0, 0, -1])))
