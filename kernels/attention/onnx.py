"""Grouped-query attention by an operator of kernels/native or of ONNX Runtime, reading and writing
one KV buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.attention.reference import PackedAttention
from edge.kernels.attention.tiles import attends_in_tiles
from edge.kernels.kv_cache.cache_size import cache_head_size
from edge.kernels.onnx_graph import CONTRIB, EDGE, OnnxGraph, Provider
from edge.kernels.rms_norm.onnx import rms_norm
from edge.kernels.rope.onnx import rope

_ROTARY_MULTIPLE = 16


def _rotates_itself(form: PackedAttention, provider: Provider) -> bool:
    """GroupQueryAttention does; else rotation is a node of its own, which needs positions."""
    if _is_by_nodes(form, provider):
        return False
    return not form.head_size % _ROTARY_MULTIPLE and not form.turned_elements % _ROTARY_MULTIPLE


def needs_positions(form: PackedAttention, provider: Provider) -> bool:
    """Whether nodes beside GroupQueryAttention need the tokens' positions."""
    turns_apart = bool(form.turned_elements) and not _rotates_itself(form, provider)
    return turns_apart or _is_by_nodes(form, provider)


def _is_by_nodes(form: PackedAttention, provider: Provider) -> bool:
    """Whether ordinary nodes attend: WebGPU's GroupQueryAttention, which then only appends to the
    cache, leaves out the soft cap."""
    return provider.attends_by_nodes or (form.soft_cap is not None and provider.is_webgpu)


def takes_counts(form: PackedAttention, kv_bits: int | None, provider: Provider) -> bool:
    """Whether the operator of kernels/native attends."""
    return provider.has_own_attention and attends_in_tiles(form, kv_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """The graph inputs that every attention of a step shares, by name.

    cos, sin [context, pairs], none where nothing turns; positions int64 [batch, tokens], where
    `needs_positions` says so; lengths int32 [batch], the index of the last key;
    total int32 scalar, the number of keys; turns int64 [batch, tokens], rows of cos and sin, where
    these are not those of the positions; counts int32 [batch], the tokens of each request, where
    the library's operator attends: these may differ, with qkv [1, tokens of all, columns]; there,
    sees_all bool scalar, whether the tokens of a request see each other, where that may be.
    """

    cos: str
    sin: str
    positions: str
    lengths: str
    total: str
    turns: str = ""
    sees_all: str = ""
    counts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNames:
    """The graph inputs that hold one layer's KV cache, by name.

    keys, values [batch, num_kv_heads, context, elements], as `cache_row` says of `bits`; if they
    are windowed, they are the newest tokens'. Codes have scales float32 [1, num_kv_heads, 1,
    channels]. unrounded float32 [batch, 2 · num_kv_heads, 1 + newest, size], see `unrounded_shape`.
    """

    keys: str
    values: str
    bits: int | None = None
    key_scales: str = ""
    value_scales: str = ""
    unrounded: str = ""
    is_windowed: bool = False


def attention(
    graph: OnnxGraph,
    qkv: str,
    cache: CacheNames,
    names: AttentionNames,
    form: PackedAttention,
    *,
    query_norm: str | None = None,
    key_norm: str | None = None,
    sinks: str | None = None,
) -> tuple[str, ...]:
    """Rotate, append to the KV cache, attend to what it then holds.

    qkv [batch, tokens, columns] → (output [batch, tokens, num_heads · head_size], present keys,
    present values, and present unrounded ones if there are some). The present outputs are meant to
    be bound onto the cache's buffers. Norms and sinks: see the reference.
    """
    num_heads, num_kv_heads, head_size = form.num_heads, form.num_kv_heads, form.head_size
    turned_elements, epsilon = form.turned_elements, form.epsilon
    by_itself = turned_elements > 0 and _rotates_itself(form, graph.provider)
    is_by_nodes = _is_by_nodes(form, graph.provider)
    unrounded: list[str] = []
    assert names.counts or not (cache.unrounded or names.sees_all), "of the library's operator only"
    padded = cache_head_size(head_size, cache.bits)
    gate = ""
    factor = head_size**-0.5 if form.scale is None else form.scale
    is_packed = by_itself and query_norm is None and not form.gated and not form.value_norm
    if is_packed and not is_by_nodes:
        query, key, value = qkv, "", ""  # packed: the operator takes it apart without a copy
    else:
        sizes = num_heads * head_size, num_kv_heads * head_size
        query, gate, key, value = _split(graph, qkv, *sizes, gated=form.gated)
        if query_norm is not None and key_norm is not None and form.joint_norm:
            query = rms_norm(graph, query, query_norm, epsilon=epsilon)
            key = rms_norm(graph, key, key_norm, epsilon=epsilon)
        elif query_norm is not None and key_norm is not None:
            query = _norm_heads(graph, query, query_norm, num_heads, head_size, epsilon)
            key = _norm_heads(graph, key, key_norm, num_kv_heads, head_size, epsilon)
        if form.value_norm:
            ones = graph.constant(f"ones_{head_size}", np.ones(head_size, np.float32))
            value = _norm_heads(graph, value, ones, num_kv_heads, head_size, epsilon)
        if turned_elements and not by_itself:
            query, key = (
                rope(
                    graph, x, names.turns or names.positions, names.cos, names.sin,
                    num_heads=count, turned_elements=turned_elements, interleaved=form.interleaved,
                )
                for x, count in ((query, num_heads), (key, num_kv_heads))
            )  # fmt: skip
        if padded != head_size:
            query = resize_heads(graph, query, num_heads, head_size, padded)
            key = resize_heads(graph, key, num_kv_heads, head_size, padded)
            value = resize_heads(graph, value, num_kv_heads, head_size, padded)
    if cache.is_windowed and sinks is None and not names.counts:
        # The kernel with sinks: the other one sums blocks of keys whose size follows from the
        # processor's cache, so a row's last bits would depend on where its keys are.
        nothing = np.full(num_heads, -np.inf, np.float32)
        sinks = graph.constant(f"no_sinks_{num_heads}", nothing)
    # The kernel for masks takes blocks of keys, which codes are unpacked for each time: one row
    # behind 1,000 tokens takes a third longer with it. Windows, caps and sinks have another one.
    takes_blocks = sinks is None and form.window is None and form.soft_cap is None
    has_ways = cache.bits == 8 and takes_blocks and not names.counts
    has_ways &= not graph.provider.is_webgpu
    is_one_row = _is_one_row(graph, qkv) if has_ways else ""
    attributes: dict[str, Any] = dict(
        num_heads=num_heads, kv_num_heads=num_kv_heads, do_rotary=int(by_itself),
        rotary_interleaved=int(form.interleaved and by_itself),
        local_window_size=-1 if form.window is None else form.window,
        scale=factor, softcap=0.0 if is_by_nodes else form.soft_cap or 0.0,
        **({"sliding_window_cache": 1} if cache.is_windowed else {}),
        **_rounding(cache),
    )  # fmt: skip
    head = query, key, value, cache.keys, cache.values
    rest = (
        names.total, names.cos if by_itself else "", names.sin if by_itself else "",
        names.turns if by_itself else "", "", sinks or "", cache.key_scales, cache.value_scales,
    )  # fmt: skip
    if names.counts:
        output, present_keys, present_values, *unrounded = graph.nodes(
            _OPERATORS[cache.bits],
            *head, names.lengths, *rest[1:4], sinks or "", cache.key_scales, cache.value_scales,
            names.counts, cache.unrounded, names.sees_all,
            outputs=4 if cache.unrounded else 3, domain=EDGE,
            heads=num_heads, kv_heads=num_kv_heads, size=padded,
            turned=form.turned_elements if by_itself else 0, interleaved=int(form.interleaved),
            window=form.window or 0, is_ring=int(cache.is_windowed), scale=bits_of(factor),
            cap=bits_of(form.soft_cap or 0.0), is_joined=0,
        )  # fmt: skip
    else:
        output, present_keys, present_values = _grouped_query(
            graph, is_one_row, *head, names.lengths, *rest, **attributes
        )
    if is_by_nodes:
        caches = present_keys, present_values
        output = _attended(graph, query, caches, names.positions, sinks, form, factor)
    if padded != head_size:
        output = resize_heads(graph, output, num_heads, padded, head_size)
    if form.gated:
        output = graph.node("Mul", output, graph.node("Sigmoid", gate))
    return output, present_keys, present_values, *unrounded


def bits_of(value: float) -> int:
    """A float32 as an attribute of the library's operators."""
    return int(np.float32(value).view(np.uint32))


def _is_one_row(graph: OnnxGraph, qkv: str) -> str:
    """Whether a step has one token of each request."""

    def make() -> tuple[str, ...]:
        tokens = graph.node("Shape", qkv, start=1, end=2)
        return (graph.node("Equal", tokens, graph.constant("one_row.1", _int64([1]))),)

    (found,) = graph.once("one_row", make)
    return found


def _grouped_query(
    graph: OnnxGraph,
    is_one_row: str,
    *inputs: str,
    **attributes: Any,
) -> tuple[str, ...]:
    """GroupQueryAttention. is_one_row: bool, whether it is without a causal mask, with the same
    bits; empty: it always has one."""

    def node(of: OnnxGraph, **more: Any) -> tuple[str, ...]:
        return of.nodes(
            "GroupQueryAttention", *inputs, outputs=3, domain=CONTRIB, **attributes, **more
        )

    if not is_one_row:
        return node(graph)
    whole, causal = graph.branch("one_row"), graph.branch("causal")
    return graph.nodes(
        "If",
        is_one_row,
        outputs=3,
        then_branch=whole.body(*node(whole, causal=0)),
        else_branch=causal.body(*node(causal)),
    )


def _attended(
    graph: OnnxGraph,
    query: str,
    caches: tuple[str, str],
    positions: str,
    sinks: str | None,
    form: PackedAttention,
    factor: float,
) -> str:
    """Attention by ordinary nodes, over all of a KV cache without NaN.

    query [batch, tokens, num_heads · size]; caches: keys and values [batch, num_kv_heads, context,
    size] → like query. Scores take num_heads · tokens · context floats.
    """
    keys, values = caches
    heads, kv_heads, size = form.num_heads, form.num_kv_heads, cache_head_size(form.head_size)

    def number(value: float) -> str:
        return graph.constant(f"attended.number_{value}", np.asarray(value, np.float32))

    def shape(*sizes: int) -> str:
        return graph.constant(f"attended.shape_{'_'.join(map(str, sizes))}", _int64(list(sizes)))

    query = graph.node("Reshape", query, shape(0, 0, heads, size))
    query = graph.node("Transpose", query, perm=[0, 2, 1, 3])
    # The heads that share keys are rows of one product: [batch, kv_heads, group · tokens, size].
    query = graph.node("Reshape", query, shape(0, kv_heads, -1, size))
    scores = graph.node("MatMul", query, graph.node("Transpose", keys, perm=[0, 1, 3, 2]))
    cap = form.soft_cap
    scores = graph.node("Mul", scores, number(factor if cap is None else factor / cap))
    if cap is not None:
        scores = graph.node("Mul", graph.node("Tanh", scores), number(cap))
    group = heads // kv_heads
    at_token = graph.node("Unsqueeze", graph.node("Cast", positions, to=_FLOAT), shape(1, 3))
    at = graph.node("Concat", *[at_token] * group, axis=2)
    length = graph.node("Gather", graph.node("Shape", keys), graph.constant("attended.2", _AXIS))
    length = graph.node("Cast", length, to=_FLOAT)
    places = graph.node("Range", number(0.0), length, number(1.0))
    is_seen = graph.node("LessOrEqual", places, at)
    if form.window is not None:
        first = graph.node("Sub", at, number(float(form.window)))
        is_seen = graph.node("And", is_seen, graph.node("Greater", places, first))
    scores = graph.node("Where", is_seen, scores, number(-np.inf))
    if sinks is not None:
        nothing = graph.node("Sub", at_token, at_token)
        of_heads = graph.node("Reshape", sinks, shape(1, kv_heads, group, 1))
        each = graph.nodes("Split", of_heads, outputs=group, axis=2) if group > 1 else (of_heads,)
        column = graph.node("Concat", *(graph.node("Add", nothing, sink) for sink in each), axis=2)
        scores = graph.node("Concat", scores, column, axis=-1)
    weights = graph.node("Softmax", scores, axis=-1)
    if sinks is not None:
        weights = graph.node("Slice", weights, shape(0), shape(-1), shape(3))
    output = graph.node("MatMul", weights, values)
    output = graph.node("Reshape", output, shape(0, heads, -1, size))
    output = graph.node("Transpose", output, perm=[0, 2, 1, 3])
    return graph.node("Reshape", output, shape(0, 0, heads * size))


_OPERATORS = {None: "Attention", 8: "CodeAttention", 4: "NibbleAttention"}
"""The names of those of kernels/native, by the bits of codes."""

_FLOAT = 1
"""Data type of TensorProto."""

_AXIS = np.asarray(2, np.int64)


def _rounding(cache: CacheNames) -> dict[str, Any]:
    """Attributes that say how the cache is rounded."""
    if cache.bits is None:
        return {}
    kinds: dict[str, Any] = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
    return {**kinds, "kv_cache_bit_width": cache.bits}


def _split(
    graph: OnnxGraph, qkv: str, query: int, kv: int, *, gated: bool
) -> tuple[str, str, str, str]:
    """qkv [batch, tokens, query + 2 · kv], or 2 · query, → query, gate, key and value apart; the
    gate is "" where there is none."""
    if gated:
        sizes = graph.constant(f"split_gated_{query}_{kv}", _int64([query, query, kv, kv]))
        q, gate, k, v = graph.nodes("Split", qkv, sizes, outputs=4, axis=-1)
        return q, gate, k, v
    sizes = graph.constant(f"split_{query}_{kv}", _int64([query, kv, kv]))
    q, k, v = graph.nodes("Split", qkv, sizes, outputs=3, axis=-1)
    return q, "", k, v


def resize_heads(graph: OnnxGraph, x: str, num_heads: int, old: int, new: int) -> str:
    """Pad each head of x [batch, tokens, num_heads · old] with zeros to `new`, or cut it."""
    heads = graph.node("Reshape", x, _shape(graph, num_heads, old))
    if new > old:
        widths = [0] * 7 + [new - old]
        heads = graph.node("Pad", heads, graph.constant(f"pad_heads_{old}_{new}", _int64(widths)))
    else:
        bounds = [graph.constant(f"bound_{v}", _int64([v])) for v in (0, new, 3)]
        heads = graph.node("Slice", heads, *bounds)
    return graph.node("Reshape", heads, _joined_shape(graph, num_heads * new))


def _norm_heads(
    graph: OnnxGraph, x: str, weight: str, num_heads: int, head_size: int, epsilon: float
) -> str:
    """RMSNorm of each head of x [batch, tokens, num_heads · head_size]."""
    heads = graph.node("Reshape", x, _shape(graph, num_heads, head_size))
    normed = rms_norm(graph, heads, weight, epsilon=epsilon)
    return graph.node("Reshape", normed, _joined_shape(graph, num_heads * head_size))


def _shape(graph: OnnxGraph, num_heads: int, head_size: int) -> str:
    return graph.constant(f"heads_{num_heads}_{head_size}", _int64([0, 0, num_heads, head_size]))


def _joined_shape(graph: OnnxGraph, size: int) -> str:
    return graph.constant(f"joined_{size}", _int64([0, 0, size]))


def _int64(values: list[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
