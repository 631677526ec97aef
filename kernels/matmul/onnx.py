"""Product with a float32 weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph, Provider


def matmul(graph: OnnxGraph, x: str, weight: str) -> str:
    """x [..., inputs], weight as `matmul_weight` has it → [..., outputs].

    FusedMatMul takes the weight transposed as it lies; a Transpose node would be folded into a
    second copy of the weight at load.
    """
    if graph.provider.is_webgpu:
        return graph.node("MatMul", x, weight)
    return graph.node("FusedMatMul", x, weight, domain=CONTRIB, transB=1)


def matmul_weight(weight: NDArray[Any], provider: Provider) -> NDArray[Any]:
    """weight [outputs, inputs] as the provider takes it: WebGPU has no product with a transposed
    matrix, so there it is [inputs, outputs]."""
    return np.ascontiguousarray(weight.T) if provider.is_webgpu else weight
