"""The activation between two products, as nodes of a graph."""

from __future__ import annotations

from edge.kernels.activation.reference import Activation
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def activated(graph: OnnxGraph, x: str, *, activation: Activation) -> str:
    """x [...] → like x."""
    if activation == "silu":
        return graph.node("Mul", x, graph.node("Sigmoid", x))
    gelu = {"gelu": "Gelu", "gelu_tanh": "FastGelu"}[activation]
    return graph.node(gelu, x, domain=CONTRIB)
