"""A layer's own inputs of each token, as nodes."""

from __future__ import annotations

import numpy as np

from edge.kernels.onnx_graph import OnnxGraph
from edge.kernels.rms_norm.onnx import rms_norm


def token_inputs(
    graph: OnnxGraph,
    product: str,
    rows: str,
    norm: str,
    *,
    size: int,
    hidden_size: int,
    epsilon: float,
) -> str:
    """product, rows [batch, tokens, size], norm [size] → like them."""

    def times(x: str, value: float) -> str:
        number = graph.constant(f"times_{value}", np.asarray(value, np.float32))
        return graph.node("Mul", x, number)

    made = rms_norm(graph, times(product, hidden_size**-0.5), norm, epsilon=epsilon)
    return times(graph.node("Add", made, times(rows, size**0.5)), 2**-0.5)
