"""activation(gate) · up on the output of one fused gate and up product."""

from __future__ import annotations

import numpy as np

from edge.kernels.activation.onnx import activated
from edge.kernels.activation.reference import Activation
from edge.kernels.gated_mlp.reference import Clamp
from edge.kernels.onnx_graph import OnnxGraph


def gated(
    graph: OnnxGraph, gate_up: str, *, activation: Activation, clamp: Clamp | None = None
) -> str:
    """gate_up [..., 2n], gate first → [..., n]. Only silu is clamped."""

    def number(value: float) -> str:
        return graph.constant(f"gated.number_{value}", np.asarray(value, np.float32))

    gate, up = graph.nodes("Split", gate_up, outputs=2, axis=-1)
    if clamp is not None:
        gate = graph.node("Min", gate, number(clamp.limit))
        up = graph.node("Clip", up, number(-clamp.limit), number(clamp.limit))
        up = graph.node("Add", up, number(1.0))
        steep = graph.node("Mul", gate, number(clamp.slope))
        active = graph.node("Mul", gate, graph.node("Sigmoid", steep))
    else:
        active = activated(graph, gate, activation=activation)
    return graph.node("Mul", active, up)
