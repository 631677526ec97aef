"""Nodes around GroupQueryAttention over codes that make it exact at the first and newest tokens.

The operator knows one cache, so the remainders of those tokens are kept apart. Scores are corrected
by the operator's bias, and outputs by the weights that it gave to those tokens. No second softmax
has to be merged with the first, and a window, a soft cap and sinks work as before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph

AFTER_SOFTMAX = 2
"""GroupQueryAttention's `qk_output` then puts out its weights, as it multiplies values by them."""

_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Sizes of one layer: head_size is that of the cache."""

    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Graph inputs, by name.

    past [batch, arrays · num_kv_heads, 1 + newest, head_size]: the remainders of keys and those of
    values, of the first token and the newest before the step, zeros where there were fewer; with a
    soft cap also the keys themselves. scales [1, num_kv_heads, 1, head_size]; positions int64
    [batch, tokens]; total int32 scalar.
    """

    past: str
    newest: int
    bits: int
    key_scales: str
    value_scales: str
    positions: str
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """What one layer's attention is given and what it gives is corrected by."""

    bias: str
    """float32 [batch, num_heads, tokens, total]: to be added to scores."""
    present: str
    """Like `past`, to be bound onto it."""
    heads: HeadSizes
    values: str
    """Remainders [batch, num_kv_heads, places, head_size]."""
    mask: str
    """float32 [batch, 1, tokens, places]: 1 where a query sees the place without rounding."""
    places: str
    """int64 [batch, num_heads, tokens, places]: the token of each."""


def corrections(
    graph: OnnxGraph,
    query: str,
    key: str,
    value: str,
    inputs: Inputs,
    heads: HeadSizes,
    *,
    scale: float,
    soft_cap: float | None,
) -> Corrections:
    """query [batch, tokens, num_heads · head_size], key and value [batch, tokens, num_kv_heads ·
    head_size], as they go into the operator, rotated."""
    count, newest = heads.num_kv_heads, inputs.newest
    both = _by_head(graph, graph.node("Concat", key, value, axis=-1), 2 * count, heads.head_size)
    new, arrays = _lacking(graph, both, inputs), 2
    if soft_cap is not None:  # whose curve needs the scores themselves
        keys = _slice(graph, both, 0, count, axis=1)
        new, arrays = graph.node("Concat", new, keys, axis=1), 3
    first, others = _split(graph, inputs.past, [1, newest], axis=2)
    own_first = _slice(graph, new, 0, 1, axis=2)
    first = graph.node("Where", _begins(graph, inputs.positions), own_first, first)
    whole = graph.node("Concat", first, others, new, axis=2)
    last = _slice(graph, whole, -newest, _LARGEST, axis=2)
    of_keys, of_values, *exact = _split(graph, whole, [count] * arrays, axis=1)
    # [batch, num_kv_heads, queries of the group · tokens, head_size]
    rows = _by_head(graph, query, heads.num_heads, heads.head_size)
    rows = graph.node("Reshape", rows, _shape(graph, 0, count, -1, heads.head_size))

    def scores(of: str) -> str:
        found = graph.node("FusedMatMul", rows, of, domain=CONTRIB, transB=1, alpha=scale)
        return graph.node("Reshape", found, _shape(graph, 0, heads.num_heads, -1, 0))

    lacking = scores(of_keys)
    if soft_cap is not None:
        capped = scores(exact[0])
        rounded = graph.node("Sub", capped, lacking)
        cap = graph.constant(f"cap_{soft_cap}", np.asarray(soft_cap, np.float32))
        curves = (graph.node("Tanh", graph.node("Div", each, cap)) for each in (capped, rounded))
        lacking = graph.node("Mul", graph.node("Sub", *curves), cap)
    mask, places, zeros = _places(graph, inputs, heads.num_heads)
    lacking = graph.node("Mul", lacking, mask)
    return Corrections(
        # Places of tokens that are not there have the first token's number, and add nothing.
        bias=graph.node("ScatterElements", zeros, places, lacking, axis=3, reduction="add"),
        present=graph.node("Concat", first, last, axis=2),
        heads=heads,
        values=of_values,
        mask=mask,
        places=places,
    )


def corrected(graph: OnnxGraph, output: str, weights: str, by: Corrections) -> str:
    """output [batch, tokens, num_heads · head_size] and weights [batch, num_heads, tokens, total]
    of the operator → like output."""
    heads = by.heads
    seen = graph.node("GatherElements", weights, by.places, axis=3)
    seen = graph.node("Mul", seen, by.mask)
    seen = graph.node("Reshape", seen, _shape(graph, 0, heads.num_kv_heads, -1, 0))
    lacking = graph.node("MatMul", seen, by.values)
    lacking = graph.node("Reshape", lacking, _shape(graph, 0, heads.num_heads, -1, 0))
    lacking = graph.node("Transpose", lacking, perm=[0, 2, 1, 3])
    width = heads.num_heads * heads.head_size
    return graph.node("Add", output, graph.node("Reshape", lacking, _shape(graph, 0, 0, width)))


def _lacking(graph: OnnxGraph, both: str, inputs: Inputs) -> str:
    """Keys and values [batch, 2 · num_kv_heads, tokens, head_size] less what their codes say."""
    scales = graph.node("Concat", inputs.key_scales, inputs.value_scales, axis=1)
    most = 2 ** (inputs.bits - 1)
    least, largest = (
        graph.constant(f"code_{each}", np.asarray(each, np.float32)) for each in (-most, most - 1)
    )
    # As the operator rounds: by the inverse, half to even.
    one = graph.constant("one", np.asarray(1, np.float32))
    codes = graph.node("Mul", both, graph.node("Div", one, scales))
    codes = graph.node("Round", codes)
    codes = graph.node("Clip", codes, least, largest)
    return graph.node("Sub", both, graph.node("Mul", codes, scales))


def _begins(graph: OnnxGraph, positions: str) -> str:
    """Whether the step has a request's first token: [batch, 1, 1, 1]."""

    def make() -> tuple[str, ...]:
        first = _slice(graph, positions, 0, 1, axis=1)
        begins = graph.node("Equal", first, _int64(graph, 0))
        return (graph.node("Unsqueeze", begins, _int64(graph, 2, 3)),)

    (value,) = graph.once("kv_remainders.begins", make)
    return value


def _places(graph: OnnxGraph, inputs: Inputs, num_heads: int) -> tuple[str, str, str]:
    """Mask, places and a bias of zeros; the same for all layers of `num_heads` heads."""
    newest = inputs.newest

    def make() -> tuple[str, ...]:
        first = _slice(graph, inputs.positions, 0, 1, axis=1)
        before = graph.constant(f"newest_{newest}", np.arange(-newest, 0, dtype=np.int64))
        tokens = graph.node(
            "Concat", graph.node("Add", first, before), inputs.positions, axis=1
        )  # of the newest before the step, and of those of the step
        # The last that a query sees rounded, but for the first token.
        last = graph.node("Sub", inputs.positions, _int64(graph, newest))
        last = graph.node("Unsqueeze", last, _int64(graph, 2))
        none = _int64(graph, -1)
        columns = graph.node("Unsqueeze", tokens, _int64(graph, 1))
        is_newest = graph.node(
            "And", graph.node("Greater", columns, last), graph.node("Greater", columns, none)
        )
        # Among the newest the first token has a place of its own.
        is_older = graph.node("Greater", last, none)
        floats = (graph.node("Cast", each, to=1) for each in (is_older, is_newest))
        mask = graph.node("Unsqueeze", graph.node("Concat", *floats, axis=2), _int64(graph, 1))
        places = graph.node("Concat", graph.node("Sub", first, first), tokens, axis=1)
        places = graph.node("Max", places, _int64(graph, 0))
        places = graph.node("Unsqueeze", places, _int64(graph, 1, 2))
        sizes = graph.node("Shape", inputs.positions)
        batch, rows = (_slice(graph, sizes, each, each + 1, axis=0) for each in range(2))
        count = _slice(graph, graph.node("Shape", places), 3, 4, axis=0)
        total = graph.node("Cast", inputs.total, to=7)
        total = graph.node("Reshape", total, _int64(graph, 1))
        heads = _int64(graph, num_heads)
        places = graph.node(
            "Expand", places, graph.node("Concat", batch, heads, rows, count, axis=0)
        )
        zeros = graph.node(
            "ConstantOfShape", graph.node("Concat", batch, heads, rows, total, axis=0)
        )
        return mask, places, zeros

    mask, places, zeros = graph.once(f"kv_remainders.places.{num_heads}", make)
    return mask, places, zeros


def _by_head(graph: OnnxGraph, x: str, count: int, size: int) -> str:
    """[batch, tokens, count · size] → [batch, count, tokens, size]."""
    apart = graph.node("Reshape", x, _shape(graph, 0, 0, count, size))
    return graph.node("Transpose", apart, perm=[0, 2, 1, 3])


def _split(graph: OnnxGraph, x: str, sizes: list[int], *, axis: int) -> tuple[str, ...]:
    return graph.nodes("Split", x, _int64(graph, *sizes), outputs=len(sizes), axis=axis)


def _slice(graph: OnnxGraph, x: str, start: int, stop: int, *, axis: int) -> str:
    return graph.node("Slice", x, *(_int64(graph, each) for each in (start, stop, axis)))


def _shape(graph: OnnxGraph, *sizes: int) -> str:
    """0: as it is there."""
    return _int64(graph, *sizes)


def _int64(graph: OnnxGraph, *values: int) -> str:
    name = "_".join(str(each) for each in values)
    return graph.constant(f"int64_{name}", np.asarray(values, np.int64))
