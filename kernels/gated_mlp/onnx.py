"""silu(gate) · up on the output of one fused gate and up product."""

from __future__ import annotations

from kernels.onnx_graph import OnnxGraph


def gated_silu(graph: OnnxGraph, gate_up: str) -> str:
    """gate_up [..., 2n], gate first → [..., n]."""
    gate, up = graph.nodes("Split", gate_up, outputs=2, axis=-1)
    silu = graph.node("Mul", gate, graph.node("Sigmoid", gate))
    return graph.node("Mul", silu, up)
