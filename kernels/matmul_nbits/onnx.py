"""Product with an int4 or int8 weight in blocks, on ONNX Runtime's integer path."""

from __future__ import annotations

from kernels.onnx_graph import CONTRIB, OnnxGraph

INTEGER_ACTIVATIONS = 4
"""accuracy_level: the activation is rounded to int8 per block; 4 to 100 times faster than 0."""


def matmul_nbits(
    graph: OnnxGraph,
    x: str,
    codes: str,
    scales: str,
    bias: str | None = None,
    *,
    rows: int,
    columns: int,
    bits: int,
    block_size: int,
    accuracy_level: int = INTEGER_ACTIVATIONS,
) -> str:
    """x [..., columns], codes and scales as in reference.py, bias [rows] → [..., rows]."""
    y = graph.node(
        "MatMulNBits", x, codes, scales,
        domain=CONTRIB, K=columns, N=rows, bits=bits, block_size=block_size,
        accuracy_level=accuracy_level,
    )  # fmt: skip
    return y if bias is None else graph.node("Add", y, bias)
