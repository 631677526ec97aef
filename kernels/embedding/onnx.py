"""Row look-up in a table that stays mapped: only the pages of used rows are ever read."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from edge.kernels.onnx_graph import OnnxGraph


def embedding(
    graph: OnnxGraph, token_ids: str, table: str, *, first_id: int, num_ids: int, whole: bool
) -> str:
    """token_ids int64 [...], table [num_ids, hidden] of any float type → float32 [..., hidden].

    With `whole` the table holds every id and nothing is masked.
    """
    if whole:
        return graph.node("Cast", graph.node("Gather", table, token_ids), to=TensorProto.FLOAT)
    first = graph.constant("embedding_first_id", np.asarray(first_id, dtype=np.int64))
    zero = graph.constant("embedding_zero", np.asarray(0, dtype=np.int64))
    count = graph.constant("embedding_count", np.asarray(num_ids, dtype=np.int64))
    local = graph.node("Sub", token_ids, first)
    inside = graph.node(
        "And", graph.node("GreaterOrEqual", local, zero), graph.node("Less", local, count)
    )
    rows = graph.node("Gather", table, graph.node("Where", inside, local, zero))
    mask = graph.node("Cast", inside, to=TensorProto.FLOAT)
    axis = graph.constant("embedding_last_axis", np.asarray([-1], dtype=np.int64))
    wide = graph.node("Cast", rows, to=TensorProto.FLOAT)
    return graph.node("Mul", wide, graph.node("Unsqueeze", mask, axis))
