"""Logits as ONNX Runtime scales and caps them: nothing where a model does not."""

from __future__ import annotations

import numpy as np

from edge.kernels.onnx_graph import OnnxGraph


def finish_logits(graph: OnnxGraph, x: str, *, scale: float, soft_cap: float | None) -> str:
    """x [..., n] → like x."""
    if soft_cap is not None:
        scale /= soft_cap
    if scale != 1.0:
        x = graph.node("Mul", x, graph.constant("logit_scale", np.asarray(scale, np.float32)))
    if soft_cap is None:
        return x
    cap = graph.constant("logit_soft_cap", np.asarray(soft_cap, np.float32))
    return graph.node("Mul", graph.node("Tanh", x), cap)
