"""Patches as nodes of a graph."""

from __future__ import annotations

import numpy as np

from edge.kernels.matmul.onnx import matmul
from edge.kernels.onnx_graph import OnnxGraph


def embed(
    graph: OnnxGraph,
    pixels: str,
    weight: str,
    scale: str,
    shift: str,
    *,
    outputs: int,
    channels: int = 3,
    frames: int = 1,
    frames_apart: bool = False,
    channels_last: bool = False,
) -> str:
    """pixels uint8 [batch, patches, (channel, y, x)], scale and shift [channels, 1] → [batch,
    patches, outputs]. weight: flat, see the formula."""

    def shaped(x: str, name: str, *sizes: int) -> str:
        return graph.node("Reshape", x, graph.constant(f"patches.{name}", np.asarray(sizes)))

    values = graph.node("Cast", shaped(pixels, "by_channel", 0, 0, channels, -1), to=1)
    values = graph.node("Add", graph.node("Mul", values, scale), shift)
    values = shaped(values, "flat", 0, 0, -1)
    if channels_last:
        rows = shaped(weight, "by_pixel", outputs, -1, channels)
        rows = graph.node("Transpose", rows, perm=[0, 2, 1])
    else:
        sizes, place = (outputs, channels, frames, -1), 2
        if frames_apart:
            sizes, place = (frames, outputs, channels, -1), 0
        rows = shaped(weight, "by_frame", *sizes)
        if frames > 1 or frames_apart:
            axis = graph.constant("patches.frame", np.asarray([place]))
            rows = graph.node("ReduceSum", rows, axis, keepdims=0)
    return matmul(graph, values, shaped(rows, "rows", outputs, -1))


def join(graph: OnnxGraph, x: str, *, size: int, block: int, joining: str) -> str:
    """x [batch, rows · block, size] → [batch, rows, block · size], or [batch, rows, size] of
    means."""
    if joining == "patches":
        shape = graph.constant(f"joined_{block}", np.asarray([0, -1, block * size]))
        return graph.node("Reshape", x, shape)
    shape = graph.constant(f"blocks_{block}", np.asarray([0, -1, block, size]))
    blocks = graph.node("Reshape", x, shape)
    if joining == "mean":
        return graph.node("ReduceMean", blocks, axes=[2], keepdims=0)
    flat = graph.constant(f"joined_{block}", np.asarray([0, 0, block * size]))
    return graph.node("Reshape", graph.node("Transpose", blocks, perm=[0, 1, 3, 2]), flat)
