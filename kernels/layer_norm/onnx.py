"""LayerNorm as ONNX Runtime computes it: one fused node, with or without the residual."""

from __future__ import annotations

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def layer_norm(graph: OnnxGraph, x: str, weight: str, bias: str, *, epsilon: float) -> str:
    """x [..., n]; weight, bias [n] → [..., n]."""
    return graph.node("LayerNormalization", x, weight, bias, epsilon=epsilon, axis=-1)


def add_layer_norm(
    graph: OnnxGraph, x: str, addend: str, weight: str, bias: str, *, epsilon: float
) -> tuple[str, str]:
    """s = x + addend; returns (layer_norm(s), s). x, addend [batch, tokens, n]."""
    normed, _mean, _deviation, total = graph.nodes(
        "SkipLayerNormalization",
        x, addend, weight, bias,
        outputs=4, domain=CONTRIB, epsilon=epsilon,
    )  # fmt: skip
    return normed, total
