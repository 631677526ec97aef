"""Learned positions of patches as nodes: one tap after the other, so that no more than a hidden
state is held besides."""

from __future__ import annotations

import numpy as np

from edge.kernels.onnx_graph import OnnxGraph
from edge.kernels.position_table.reference import Table

TAPS: dict[Table, int] = {"buckets": 1, "bilinear": 4, "axes": 2}


def position_table(
    graph: OnnxGraph, x: str, places: str, shares: str, table: str, *, taps: int
) -> str:
    """x [batch, patches, n]; places, shares [taps, patches]; table [rows, n] → like x."""
    last = graph.constant("positions.last", np.asarray([-1]))
    for tap in range(taps):
        number = graph.constant(f"positions.tap_{tap}", np.asarray(tap))
        rows = graph.node("Gather", table, graph.node("Gather", places, number, axis=0), axis=0)
        share = graph.node("Unsqueeze", graph.node("Gather", shares, number, axis=0), last)
        x = graph.node("Add", x, graph.node("Mul", rows, share))
    return x
