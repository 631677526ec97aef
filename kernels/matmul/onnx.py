"""Product with a float32 weight that stays in the checkpoint's row order."""

from __future__ import annotations

from kernels.onnx_graph import CONTRIB, OnnxGraph


def matmul(graph: OnnxGraph, x: str, weight: str, bias: str | None = None) -> str:
    """x [..., inputs], weight [outputs, inputs], bias [outputs] → [..., outputs].

    FusedMatMul takes the weight transposed as it lies; a Transpose node would be folded into a
    second copy of the weight at load.
    """
    y = graph.node("FusedMatMul", x, weight, domain=CONTRIB, transB=1)
    return y if bias is None else graph.node("Add", y, bias)
