"""Rotary position embedding as a node of its own.

Attention rotates by itself when the head size is a multiple of 16; other sizes pass here first.
"""

from __future__ import annotations

from kernels.onnx_graph import CONTRIB, OnnxGraph


def rope(graph: OnnxGraph, x: str, positions: str, cos: str, sin: str, *, num_heads: int) -> str:
    """x [batch, tokens, heads · head_size], positions int64 [batch, tokens] → like x."""
    return graph.node(
        "RotaryEmbedding", x, positions, cos, sin,
        domain=CONTRIB, num_heads=num_heads, interleaved=0,
    )  # fmt: skip
