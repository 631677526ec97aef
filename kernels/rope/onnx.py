"""Rotary position embedding as a node of its own.

Attention rotates by itself in steps of 16 elements; other sizes pass here first.
"""

from __future__ import annotations

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def rope(
    graph: OnnxGraph,
    x: str,
    positions: str,
    cos: str,
    sin: str,
    *,
    num_heads: int,
    turned_elements: int,
    interleaved: bool = False,
) -> str:
    """x [batch, tokens, heads · head_size], positions int64 [batch, tokens] → like x.

    turned_elements: of each head, the first ones.
    """
    return graph.node(
        "RotaryEmbedding", x, positions, cos, sin,
        domain=CONTRIB, num_heads=num_heads, interleaved=int(interleaved),
        rotary_embedding_dim=turned_elements,
    )  # fmt: skip
