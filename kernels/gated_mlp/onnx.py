"""activation(gate) · up on the output of one fused gate and up product."""

from __future__ import annotations

from edge.kernels.gated_mlp.reference import Activation
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def gated(graph: OnnxGraph, gate_up: str, *, activation: Activation) -> str:
    """gate_up [..., 2n], gate first → [..., n]."""
    gate, up = graph.nodes("Split", gate_up, outputs=2, axis=-1)
    if activation == "silu":
        active = graph.node("Mul", gate, graph.node("Sigmoid", gate))
    else:
        gelu = {"gelu": "Gelu", "gelu_tanh": "FastGelu"}[activation]
        active = graph.node(gelu, gate, domain=CONTRIB)
    return graph.node("Mul", active, up)
