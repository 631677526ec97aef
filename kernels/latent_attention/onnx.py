"""Latent attention by ordinary nodes, which read the rows of a cache once for all heads.

GroupQueryAttention reads them once for each head: behind 16,384 rows of 576 elements, one token of
20 heads took it 53 ms on one thread, and these nodes 16 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.latent_attention.reference import BLOCK_TOKENS, LatentForm
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph

_SUMMED_TOGETHER = 128
"""Inputs of a product that ONNX Runtime sums up before it adds them to the rest. It takes more of
them where a thread has at most half as many outputs of a row."""

_DIVIDED = 16
"""Threads divide outputs of a row in multiples of this, if there are fewer rows than outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """The graph inputs of one layer's rows, by name.

    first, second [batch, 1, context, half_size]: halves of rows, without NaN. positions int64
    [batch, tokens]. lengths, total: see AttentionNames.
    """

    first: str
    second: str
    positions: str
    lengths: str
    total: str


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
    queries. present: names of the graph's outputs for both halves, which are meant to be bound onto
    the cache's buffers. A cache of one request may be cut behind the places that it sees.
    """
    halves = _shape(graph, form.half_size, form.half_size)
    of_rows = graph.nodes("Split", rows, halves, outputs=2, axis=-1)
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
    sizes = graph.once("latent.sizes", lambda: _blocks(graph, cache.positions))
    *_, is_alone = sizes
    alone, several = graph.branch("alone"), graph.branch("several")

    return graph.node(
        "If",
        is_alone,
        then_branch=alone.body(_attended(alone, queries, present, cache.positions, form)),
        else_branch=several.body(
            _in_blocks(several, queries, present, cache.positions, sizes, form)
        ),
    )


def _blocks(graph: OnnxGraph, positions: str) -> tuple[str, str, str]:
    """The batch of positions [batch, tokens], the number of blocks of each request, and whether it
    is one block in all."""
    batch, tokens = _size(graph, positions, 0), _size(graph, positions, 1)
    size = _integer(graph, BLOCK_TOKENS)
    begun = graph.node("Add", tokens, _integer(graph, BLOCK_TOKENS - 1))
    blocks = graph.node("Div", begun, size)
    is_alone = graph.node("Equal", graph.node("Mul", batch, blocks), _integer(graph, 1))
    return batch, blocks, is_alone


def _in_blocks(
    graph: OnnxGraph,
    queries: str,
    cache: tuple[str, str],
    positions: str,
    sizes: tuple[str, ...],
    form: LatentForm,
) -> str:
    """Some tokens of one request after the other attend to a copy of the places that they see: so
    that their bits do not depend on the rest of the step, and scores take little memory."""
    batch, blocks, _is_alone = sizes
    tokens = _size(graph, positions, 1)
    # Blocks are alike: of all tokens of a short step, else of BLOCK_TOKENS, filled up with zeros.
    size = graph.node("Min", tokens, _integer(graph, BLOCK_TOKENS))
    missing = graph.node("Sub", graph.node("Mul", blocks, size), tokens)

    def filled(x: str, behind: int) -> str:
        pads = [_shape(graph, *[0] * (3 + behind)), _listed(graph, missing)]
        pads += [_shape(graph, *[0] * behind)] * bool(behind)
        return graph.node("Pad", x, graph.node("Concat", *pads, axis=0))

    columns = form.num_heads * form.filled_size
    shape = graph.node("Concat", _shape(graph, -1), _listed(graph, size), axis=0)
    flat_shape = graph.node("Concat", shape, _shape(graph, columns), axis=0)
    queries = graph.node("Reshape", filled(queries, 1), flat_shape)
    places = graph.node("Reshape", filled(positions, 0), shape)

    def attend(each: OnnxGraph, number: str) -> str:
        place = _listed(each, number)
        own, at = (each.node("Gather", x, place) for x in (queries, places))
        request = _listed(each, each.node("Div", number, blocks))
        begin = each.node("Concat", request, _shape(each, 0), axis=0)
        behind = each.node("Add", request, _shape(each, 1))
        end = each.node("Concat", behind, _listed(each, _seen(each, at, cache[0])), axis=0)
        halves = [each.node("Slice", half, begin, end, _shape(each, 0, 2)) for half in cache]
        mixed = _attended(each, own, (halves[0], halves[1]), at, form)
        return each.node("Squeeze", mixed, _shape(each, 0))

    mixed = graph.for_each(graph.node("Mul", batch, blocks), attend)
    whole = graph.node("Concat", _listed(graph, batch), _shape(graph, -1, columns), axis=0)
    mixed = graph.node("Reshape", mixed, whole)
    return graph.node("Slice", mixed, _shape(graph, 0), _listed(graph, tokens), _shape(graph, 1))


def seen_places(tokens: int, context_tokens: int, *, threads: int) -> int:
    """The places of a cache that a request of so many tokens sees; those behind its tokens have
    weights of 0. A row has the same bits however many they are, because each thread has whole
    blocks of them."""
    multiple = _SUMMED_TOGETHER * threads
    return min(-(-tokens // multiple) * multiple, context_tokens)


def rows_agree(form: LatentForm, context_tokens: int, *, threads: int) -> bool:
    """Whether a row has the same bits in every step of several tokens: in a context with whole
    blocks for each thread, or with halves of rows that are summed up at once."""
    return context_tokens >= _SUMMED_TOGETHER * threads or form.half_size <= _SUMMED_TOGETHER


def _seen(graph: OnnxGraph, positions: str, cache: str) -> str:
    """`seen_places` of a request whose last tokens have these positions."""
    last = graph.node("ReduceMax", positions, keepdims=0)
    multiple = _integer(graph, _SUMMED_TOGETHER * graph.provider.threads)
    blocks = graph.node("Add", graph.node("Div", last, multiple), _integer(graph, 1))
    whole = graph.node("Mul", blocks, multiple)
    return graph.node("Min", whole, _size(graph, cache, 2))


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
    rows = ""
    if form.half_size // _DIVIDED // graph.provider.threads * _DIVIDED <= _SUMMED_TOGETHER // 2:
        rows = _size(graph, weights, 2)
        weights = _enough_rows(graph, weights, rows, form)
    mixed = [graph.node("MatMul", weights, half) for half in cache]
    whole = graph.node("Concat", *mixed, axis=-1)
    if rows:
        ends = _shape(graph, 0), _listed(graph, rows), _shape(graph, 2)
        whole = graph.node("Slice", whole, *ends)
    return graph.node("Reshape", whole, _shape(graph, 1, -1, form.num_heads * form.filled_size))


def _enough_rows(graph: OnnxGraph, weights: str, rows: str, form: LatentForm) -> str:
    """Weights [1, 1, rows, places] of several tokens with rows of 0, so that threads divide rows:
    they would divide so few columns into parts for which sums are in another order."""
    few = graph.node("Greater", rows, _integer(graph, form.num_heads))
    wanted = graph.node("Where", few, _integer(graph, form.half_size), _integer(graph, 0))
    lacking = graph.node("Max", graph.node("Sub", wanted, rows), _integer(graph, 0))
    pads = _shape(graph, *[0] * 6), _listed(graph, lacking), _shape(graph, 0)
    return graph.node("Pad", weights, graph.node("Concat", *pads, axis=0))


def _scores(graph: OnnxGraph, query: str, half: str, scale: float) -> str:
    if graph.provider.is_webgpu:
        product = graph.node("MatMul", query, graph.node("Transpose", half, perm=[0, 1, 3, 2]))
        return graph.node("Mul", product, _number(graph, scale))
    return graph.node("FusedMatMul", query, half, domain=CONTRIB, transB=1, alpha=scale)


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
