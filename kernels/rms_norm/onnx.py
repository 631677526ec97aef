"""RMSNorm as ONNX Runtime computes it: one fused node, with or without the residual."""

from __future__ import annotations

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def rms_norm(graph: OnnxGraph, x: str, weight: str, *, epsilon: float) -> str:
    """x [..., n], weight [n] → [..., n]."""
    return graph.node("SimplifiedLayerNormalization", x, weight, epsilon=epsilon, axis=-1)


def add_rms_norm(
    graph: OnnxGraph, x: str, addend: str, weight: str, *, epsilon: float
) -> tuple[str, str]:
    """s = x + addend; returns (rms_norm(s), s). x, addend [batch, tokens, n]."""
    normed, _mean, _deviation, total = graph.nodes(
        "SkipSimplifiedLayerNormalization",
        x, addend, weight,
        outputs=4, domain=CONTRIB, epsilon=epsilon,
    )  # fmt: skip
    return normed, total
