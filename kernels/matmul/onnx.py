"""Product with a float32 weight that stays in the checkpoint's row order."""

from __future__ import annotations

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def matmul(graph: OnnxGraph, x: str, weight: str) -> str:
    """x [..., inputs], weight [outputs, inputs] → [..., outputs].

    FusedMatMul takes the weight transposed as it lies; a Transpose node would be folded into a
    second copy of the weight at load.
    """
    return graph.node("FusedMatMul", x, weight, domain=CONTRIB, transB=1)
