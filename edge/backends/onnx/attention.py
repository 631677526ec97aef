"""The nodes of an attention layer, and its KV cache as inputs and outputs."""

from __future__ import annotations

from functools import partial

import numpy as np

from edge.backends.onnx.latent_attention import lower_latent
from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import Entry, SegmentBuilder
from edge.backends.onnx.segments import rotation_names
from edge.kernels.attention.onnx import AttentionNames, CacheNames, attention, takes_counts
from edge.kernels.attention.onnx import needs_positions as attention_needs_positions
from edge.kernels.kv_cache.cache_size import (
    cache_head_size,
    cache_row,
    keeps_unrounded,
    unrounded_shape,
)
from edge.models.attention import Attention


def lower_attention(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: Attention
) -> str:
    """Add the nodes of the layer's attention. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    normed = stream.norm(f"{p}attention_norm")
    if layer in build.spec.lenders:
        stream.keep(layer)
    if part.keys_of is not None:
        query = build.linear(normed, f"{p}query")
        keys_values = build.linear(stream.kept(part.keys_of, f"{p}keys_norm"), f"{p}key_value")
        qkv = build.graph.node("Concat", query, keys_values, axis=-1)
    elif part.latent is not None:
        inputs = partial(_inputs, build, part, needs_positions=True)
        output = lower_latent(build, layer, normed, part, inputs)
        build.segment.cache_layer = build.layout.cache_layer(layer)
        return build.linear(output, f"{p}output")
    else:
        qkv = build.linear(normed, f"{p}qkv")

    def of_entry(entry: Entry, packed: str) -> str:
        """Attention of a step, or of one of its requests."""
        cache = _cache(build, layer, part, entry)
        output, *present = attention(
            build.graph,
            packed,
            cache,
            _inputs(build, part, entry),
            part.packed(build.spec.norm_epsilon),
            query_norm=build.vector(f"{p}query_norm"),
            key_norm=build.vector(f"{p}key_norm"),
            sinks=build.vector(f"{p}sinks"),
        )
        dtype, shape = _cache_rows(build, part, entry)
        for value, name in zip(present, ("key", "value"), strict=False):
            build.output(value, entry.named(f"present_{name}_{layer}"), dtype, shape)
        if cache.unrounded:
            build.output(present[2], f"present_unrounded_{layer}", np.float32, _unrounded(part))
        return output

    output = build.by_entry(of_entry, qkv)
    build.segment.cache_layer = build.layout.cache_layer(layer)
    return build.linear(output, f"{p}output")


def _inputs(
    build: SegmentBuilder, part: Attention, entry: Entry, *, needs_positions: bool = False
) -> AttentionNames:
    graph, turned = build.graph, part.rotary.turned_elements
    cos = sin = positions = ""
    if turned:
        cos, sin = (
            graph.input(name, np.float32, ["context", turned // 2])
            for name in rotation_names(build.layout.rotations.index(part.rotary))
        )
    packed = part.packed(build.spec.norm_epsilon)
    counts = ""
    is_latent = part.latent is not None and graph.provider.has_own_attention
    if is_latent or takes_counts(packed, build.kv_bits, graph.provider):
        counts = graph.input(entry.named("counts"), np.int32, [entry.requests])
    if needs_positions or attention_needs_positions(packed, graph.provider):
        positions = graph.input(entry.named("positions"), np.int64, [entry.size, "tokens"])
    turns = sees_all = ""
    if part.rotary.axes:
        turns = graph.input(entry.named("turns"), np.int64, [entry.size, "tokens"])
    if part.sees_pictures and counts:
        sees_all = graph.input("sees_all", np.bool_, [])
    return AttentionNames(
        turns=turns,
        sees_all=sees_all,
        cos=cos,
        sin=sin,
        positions=positions,
        lengths=graph.input(entry.named("lengths"), np.int32, [entry.requests]),
        counts=counts,
        total=graph.input(entry.named("total"), np.int32, []),
    )


def _cache(build: SegmentBuilder, layer: int, part: Attention, entry: Entry) -> CacheNames:
    bits = build.kv_bits
    dtype, shape = _cache_rows(build, part, entry)
    keys = build.input(entry.named(f"past_key_{layer}"), dtype, shape)
    values = build.input(entry.named(f"past_value_{layer}"), dtype, shape)
    is_windowed = part.kept_tokens is not None
    if bits is None:
        return CacheNames(keys=keys, values=values, is_windowed=is_windowed)
    scales: list[int | str] = [1, part.num_kv_heads, 1, cache_head_size(part.head_size, bits)]
    unrounded = ""
    if keeps_unrounded(bits) and layer in build.layout.caches:
        unrounded = build.input(f"past_unrounded_{layer}", np.float32, _unrounded(part))
    return CacheNames(
        keys=keys,
        values=values,
        bits=bits,
        key_scales=build.input(f"key_scales_{layer}", np.float32, scales),
        value_scales=build.input(f"value_scales_{layer}", np.float32, scales),
        unrounded=unrounded,
        is_windowed=is_windowed,
    )


def _unrounded(part: Attention) -> list[int | str]:
    return ["batch", *unrounded_shape(part.num_kv_heads, part.head_size)]


def _cache_rows(
    build: SegmentBuilder, part: Attention, entry: Entry
) -> tuple[type[np.generic], list[int | str]]:
    """(dtype, shape) of one layer's keys, which is also that of its values."""
    dtype, elements = cache_row(part.head_size, build.kv_bits)
    rows = entry.named("context") if part.kept_tokens is None else part.kept_tokens
    return dtype, [entry.requests, part.num_kv_heads, rows, elements]
