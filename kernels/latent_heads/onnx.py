"""Keys and values of heads as nodes, laid out as attention takes them."""

from __future__ import annotations

import numpy as np

from edge.kernels.attention.onnx import resize_heads
from edge.kernels.onnx_graph import OnnxGraph


def latent_heads(
    graph: OnnxGraph,
    product: str,
    shared: str,
    *,
    num_heads: int,
    own_size: int,
    shared_size: int,
    value_size: int,
) -> str:
    """product [batch, tokens, num_heads · (own_size + value_size)], keys first; shared [batch,
    tokens, shared_size] → keys, then values [batch, tokens, 2 · num_heads · (shared_size +
    own_size)]. See the reference."""

    def integers(*values: int) -> str:
        name = "_".join(map(str, values))
        return graph.constant(f"latent.integers_{name}", np.asarray(values, np.int64))

    size = shared_size + own_size
    sizes = integers(num_heads * own_size, num_heads * value_size)
    own, values = graph.nodes("Split", product, sizes, outputs=2, axis=-1)
    own = graph.node("Reshape", own, integers(0, 0, num_heads, own_size))
    turned = graph.node("Unsqueeze", shared, integers(2))
    turned = graph.node("Expand", turned, integers(1, 1, num_heads, 1))
    keys = graph.node("Concat", turned, own, axis=-1)
    keys = graph.node("Reshape", keys, integers(0, 0, num_heads * size))
    if value_size != size:
        values = resize_heads(graph, values, num_heads, value_size, size)
    return graph.node("Concat", keys, values, axis=-1)
