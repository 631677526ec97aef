"""Attention without a mask as ONNX Runtime computes it: one fused node, block by block, so that
scores of all rows are never in memory at once."""

from __future__ import annotations

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def whole_attention(graph: OnnxGraph, query: str, keys: str, values: str, *, num_heads: int) -> str:
    """query, keys, values [batch, rows, num_heads · size] → like query."""
    return graph.node(
        "MultiHeadAttention", query, keys, values, domain=CONTRIB, num_heads=num_heads
    )
