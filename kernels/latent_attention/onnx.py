"""Latent attention: by an operator of kernels/native, or by ordinary nodes.

Both read the rows of a cache once for all heads. GroupQueryAttention of ONNX Runtime reads them
once for each head: one token of 20 heads behind 16,384 rows of 576 elements took it 53 ms on one
thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.attention.onnx import bits_of
from edge.kernels.latent_attention.reference import LatentForm
from edge.kernels.onnx_graph import CONTRIB, EDGE, OnnxGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """The graph inputs of one layer's rows, by name.

    first, second [batch, 1, context, half_size]: halves of rows; without NaN where nodes attend.
    positions int64 [batch, tokens], of nodes. lengths, total, counts: see AttentionNames.
    """

    first: str
    second: str
    positions: str
    lengths: str
    total: str
    counts: str = ""


def latent_attention(
    graph: OnnxGraph,
    queries: str,
    rows: str,
    cache: LatentCache,
    form: LatentForm,
    *,
    present: tuple[str, str],
) -> str:
    """Append rows to the cache, attend to what it then holds.

    queries [batch, tokens, num_heads · filled_size], rows [batch, tokens, filled_size] → like
    queries; with counts, tokens as `attention` takes them. present: names of the graph's outputs
    for both halves, which are meant to be bound onto the cache's buffers.
    """
    halves = _shape(graph, form.half_size, form.half_size)
    of_rows = graph.nodes("Split", rows, halves, outputs=2, axis=-1)
    if cache.counts:
        output, *_ = graph.nodes(
            "Attention", queries, *of_rows, cache.first, cache.second, cache.lengths, "", "", "",
            "", "", "", cache.counts, outputs=3, named=present, domain=EDGE, heads=form.num_heads,
            kv_heads=1, size=form.half_size, turned=0, interleaved=0, window=0, is_ring=0,
            scale=bits_of(form.scale), cap=0, is_joined=1,
        )  # fmt: skip
        return output
    if graph.provider.is_webgpu:
        # The operator appends in place; its result is not used.
        graph.nodes(
            "GroupQueryAttention", of_rows[0], *of_rows, cache.first, cache.second, cache.lengths,
            cache.total, outputs=3, named=present, domain=CONTRIB, num_heads=1, kv_num_heads=1,
        )  # fmt: skip
        return _attended(graph, queries, present, cache.positions, form)
    (places,) = graph.once("latent.places", lambda: (_places(graph, cache.positions),))
    for past, half, name in zip((cache.first, cache.second), of_rows, present, strict=True):
        rows = graph.node("Unsqueeze", half, _shape(graph, 1))
        graph.nodes("ScatterND", past, places, rows, outputs=1, named=(name,))

    def attend(each: OnnxGraph, request: str) -> str:
        at = _listed(each, request)
        own, places = (each.node("Gather", x, at) for x in (queries, cache.positions))
        behind = each.node("Add", each.node("ReduceMax", places, keepdims=0), _integer(each, 1))
        begin = each.node("Concat", at, _shape(each, 0), axis=0)
        end = each.node(
            "Concat", each.node("Add", at, _shape(each, 1)), _listed(each, behind), axis=0
        )
        seen = [each.node("Slice", half, begin, end, _shape(each, 0, 2)) for half in present]
        mixed = _attended(each, own, (seen[0], seen[1]), places, form)
        return each.node("Squeeze", mixed, _shape(each, 0))

    return graph.for_each(_size(graph, cache.positions, 0), attend)


def _places(graph: OnnxGraph, positions: str) -> str:
    """Positions [batch, tokens] → places in a cache [batch, 1, tokens, 3]."""
    tokens = graph.node("Unsqueeze", positions, _shape(graph, 1, 3))
    zeros = graph.node("Mul", tokens, _integer(graph, 0))
    count = _size(graph, positions, 0)
    request = graph.node("Range", _integer(graph, 0), count, _integer(graph, 1))
    request = graph.node("Unsqueeze", request, _shape(graph, 1, 2, 3))
    return graph.node("Concat", graph.node("Add", request, zeros), zeros, tokens, axis=-1)


def _attended(
    graph: OnnxGraph, queries: str, cache: tuple[str, str], positions: str, form: LatentForm
) -> str:
    """Attention of one request to all places of a cache. Scores take num_heads · tokens · context
    floats, twice."""
    # The heads of all tokens are rows of one product: [1, 1, tokens · heads, half_size].
    queries = graph.node("Reshape", queries, _shape(graph, 1, 1, -1, form.filled_size))
    halves = graph.nodes(
        "Split", queries, _shape(graph, form.half_size, form.half_size), outputs=2, axis=-1
    )
    by_half = [
        _scores(graph, query, half, form.scale) for query, half in zip(halves, cache, strict=True)
    ]
    length = _size(graph, cache[0], 2)

    def with_length(x: str, *sizes: int) -> str:
        shape = graph.node("Concat", _shape(graph, *sizes), _listed(graph, length), axis=0)
        return graph.node("Reshape", x, shape)

    scores = with_length(graph.node("Add", *by_half), 1, -1, form.num_heads)
    place = graph.node("Range", _integer(graph, 0), length, _integer(graph, 1))
    at = graph.node("Unsqueeze", positions, _shape(graph, 2, 3))
    is_seen = graph.node("LessOrEqual", place, at)
    addend = graph.node("Where", is_seen, _number(graph, 0.0), _number(graph, -np.inf))
    weights = graph.node("Softmax", graph.node("Add", scores, addend), axis=-1)
    weights = with_length(weights, 1, 1, -1)
    mixed = [graph.node("MatMul", weights, half) for half in cache]
    whole = graph.node("Concat", *mixed, axis=-1)
    return graph.node("Reshape", whole, _shape(graph, 1, -1, form.num_heads * form.filled_size))


def _scores(graph: OnnxGraph, query: str, half: str, scale: float) -> str:
    product = graph.node("MatMul", query, graph.node("Transpose", half, perm=[0, 1, 3, 2]))
    return graph.node("Mul", product, _number(graph, scale))


def _size(graph: OnnxGraph, x: str, axis: int) -> str:
    return graph.node("Gather", graph.node("Shape", x), _integer(graph, axis))


def _listed(graph: OnnxGraph, scalar: str) -> str:
    return graph.node("Unsqueeze", scalar, _shape(graph, 0))


def _integer(graph: OnnxGraph, value: int) -> str:
    return graph.constant(f"latent.integer_{value}", np.asarray(value, np.int64))


def _number(graph: OnnxGraph, value: float) -> str:
    return graph.constant(f"latent.number_{value}", np.asarray(value, np.float32))


def _shape(graph: OnnxGraph, *sizes: int) -> str:
    return graph.constant(f"latent.sizes_{'_'.join(map(str, sizes))}", _int64(sizes))


def _int64(values: tuple[int, ...]) -> NDArray[np.int64]:
    return np.asarray(values, np.int64)
