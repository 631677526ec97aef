"""Rows of a picture behind a sliding window: they see each other, and what is before them as far as
the window goes back. GroupQueryAttention has a causal mask wherever it has a window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.attention.reference import PackedAttention
from edge.kernels.onnx_graph import OnnxGraph


def seeing_all(
    graph: OnnxGraph,
    query: str,
    new: tuple[str, str],
    past: tuple[str, str],
    scales: tuple[str, str],
    total: str,
    form: PackedAttention,
    *,
    size: int,
    kept: int | None,
    factor: float,
) -> tuple[str, str]:
    """One request's rows, by ordinary nodes.

    query [1, tokens, num_heads · size]; new: keys and values of these tokens [1, tokens,
    num_kv_heads · size]; past [1, num_kv_heads, rows, size] those before, of which there are `kept`
    at most; None: all. scales [1, num_kv_heads, 1, size] of codes; empty: there are none. total
    int32 scalar, the number of keys with those of the step → (like query, an int32 0 that is there
    once the past was read).
    """
    assert form.window is not None
    assert form.soft_cap is None
    heads, kv_heads, window = form.num_heads, form.num_kv_heads, form.window

    def number(value: int) -> str:
        return graph.constant(f"pictures.{value}", np.asarray([value], np.int64))

    def shape(*sizes: int) -> str:
        values = np.asarray(sizes, np.int64)
        return graph.constant(f"pictures.shape_{'_'.join(map(str, sizes))}", values)

    count = graph.node("Shape", query, start=1, end=2)
    end = graph.node("Reshape", graph.node("Cast", total, to=_INT64), shape(1))
    position = graph.node("Sub", end, count)
    first = number(0)
    if kept is not None:  # as WindowRows.first
        step = kept - window + 1
        beyond = graph.node("Max", graph.node("Sub", position, number(kept)), number(0))
        steps = graph.node("Div", graph.node("Add", beyond, number(step - 1)), number(step))
        first = graph.node("Mul", steps, number(step))
    rows = graph.node("Sub", position, first)
    both, read = [], []
    for own, before, scale in zip(new, past, scales, strict=True):
        begun = graph.node("Slice", before, number(0), rows, number(2))
        read.append(graph.node("Size", begun))
        if scale:
            begun = graph.node("Mul", graph.node("Cast", begun, to=_FLOAT), scale)
        heads_apart = graph.node("Reshape", own, shape(0, 0, kv_heads, size))
        added = graph.node("Transpose", heads_apart, perm=[0, 2, 1, 3])
        both.append(graph.node("Concat", begun, added, axis=2))
    keys, values = both
    query = graph.node("Reshape", query, shape(0, 0, heads, size))
    query = graph.node("Transpose", query, perm=[0, 2, 1, 3])
    query = graph.node("Reshape", query, shape(0, kv_heads, -1, size))
    scores = graph.node("MatMul", query, graph.node("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = graph.node("Mul", scores, graph.constant("pictures.factor", _float(factor)))
    none, one = (graph.constant(f"pictures.{name}", value) for name, value in _SCALARS)
    at = graph.node("Add", position, graph.node("Range", none, _scalar(graph, count), one))
    at = graph.node("Tile", at, number(heads // kv_heads))
    at = graph.node("Unsqueeze", at, number(1))
    places = graph.node("Range", _scalar(graph, first), _scalar(graph, end), one)
    is_seen = graph.node("Greater", places, graph.node("Sub", at, number(window)))
    nothing = graph.constant("pictures.nothing", _float(-np.inf))
    weights = graph.node("Softmax", graph.node("Where", is_seen, scores, nothing), axis=-1)
    output = graph.node("MatMul", weights, values)
    output = graph.node("Reshape", output, shape(0, heads, -1, size))
    output = graph.node("Transpose", output, perm=[0, 2, 1, 3])
    output = graph.node("Reshape", output, shape(0, 0, heads * size))
    zero = graph.node("Mul", graph.node("Add", *read), _scalar(graph, number(0)))
    return output, graph.node("Cast", zero, to=_INT32)


def _scalar(graph: OnnxGraph, one: str) -> str:
    return graph.node("Squeeze", one)


def _float(value: float) -> NDArray[np.float32]:
    return np.asarray(value, np.float32)


_SCALARS = (("none", np.asarray(0, np.int64)), ("one", np.asarray(1, np.int64)))

_FLOAT, _INT32, _INT64 = 1, 6, 7
"""Data types of TensorProto."""
