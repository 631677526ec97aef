"""The nodes of latent attention: rows and queries for them, and what heads make of mixed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from edge.backends.onnx.segment_builder import Entry, SegmentBuilder
from edge.kernels.attention.onnx import AttentionNames
from edge.kernels.latent_attention.onnx import LatentCache, latent_attention
from edge.kernels.onnx_graph import OnnxGraph
from edge.kernels.rms_norm.onnx import rms_norm
from edge.kernels.rope.onnx import rope
from edge.models.attention import Attention
from edge.models.latent_attention import Latent, of_head


def lower_latent(
    build: SegmentBuilder,
    layer: int,
    normed: str,
    part: Attention,
    inputs: Callable[[Entry], AttentionNames],
) -> str:
    """The values of all heads [batch, tokens, num_heads · value_size]. inputs: those of the graph
    that every attention of an entry shares."""
    p, latent, form, count = f"layers.{layer}.", part.latent, part.latent_form, part.num_heads
    assert latent is not None
    query, made_of, shared = _of_hidden(build, p, normed, latent)
    build.observed.observe(build.segment, made_of, of_head(p, "values", 0))
    sizes = [latent.shared_size, part.head_size - latent.shared_size] * count
    pieces = _pieces(build.graph, query, sizes)
    turning = build.graph.node("Concat", *pieces[::2], axis=-1)
    products = [
        build.linear_unobserved(of_keys, of_head(p, "keys", number))
        for number, of_keys in enumerate(pieces[1::2])
    ]
    absorbed = build.graph.node("Concat", *products, axis=-1)

    def of_entry(entry: Entry, absorbed: str, turning: str, made_of: str, shared: str) -> str:
        graph, names = build.graph, inputs(entry)
        turn = partial(
            rope,
            graph,
            positions=names.positions,
            cos=names.cos,
            sin=names.sin,
            turned_elements=latent.shared_size,
            interleaved=part.rotary.is_interleaved,
        )
        turning, shared = turn(turning, num_heads=count), turn(shared, num_heads=1)
        shape: list[int | str] = [entry.requests, 1, entry.named("context"), form.half_size]
        past = [
            build.input(entry.named(f"past_{name}_{layer}"), np.float32, shape)
            for name in ("key", "value")
        ]
        present = [entry.named(f"present_{name}_{layer}") for name in ("key", "value")]
        local = [build.segment.names.local(name) for name in present]
        output = latent_attention(
            graph,
            _joined(graph, absorbed, turning, count, latent, form.filled_size),
            _joined(graph, made_of, shared, 1, latent, form.filled_size),
            LatentCache(
                first=past[0], second=past[1], positions=names.positions,
                lengths=names.lengths, total=names.total, counts=names.counts,
            ),
            form,
            present=(local[0], local[1]),
        )  # fmt: skip
        for name, value in zip(present, local, strict=True):
            build.output(value, name, np.float32, shape)
        return output

    mixed = build.by_entry(of_entry, absorbed, turning, made_of, shared)
    pieces = _pieces(build.graph, mixed, [latent.rank, form.filled_size - latent.rank] * count)
    values = [
        build.linear_unobserved(of_rows, of_head(p, "values", number))
        for number, of_rows in enumerate(pieces[::2])
    ]
    return build.graph.node("Concat", *values, axis=-1)


def _of_hidden(build: SegmentBuilder, p: str, normed: str, latent: Latent) -> tuple[str, str, str]:
    """Queries [batch, tokens, num_heads · head_size], what turns being first in each head; latent
    vectors; what turns of rows."""

    def normed_latent(x: str, name: str) -> str:
        weight = build.own_vector(f"{p}{name}")
        return rms_norm(build.graph, x, weight, epsilon=latent.norm_epsilon)

    sizes = [latent.rank, latent.shared_size]
    sizes = sizes if latent.query_rank is None else [latent.query_rank, *sizes]
    *of_query, made_of, shared = _pieces(build.graph, build.linear(normed, f"{p}latent"), sizes)
    if of_query:
        normed = normed_latent(of_query[0], "query_latent_norm")
    query = build.linear(normed, f"{p}query")
    return query, normed_latent(made_of, "kv_latent_norm"), shared


def _joined(
    graph: OnnxGraph, made_of: str, turned: str, count: int, latent: Latent, filled_size: int
) -> str:
    """Rows, or queries for them, with zeros at the end: [batch, tokens, count · filled_size]."""

    def apart(x: str, size: int) -> str:
        name = f"latent.heads_{count}_{size}"
        return graph.node("Reshape", x, graph.constant(name, np.array([0, 0, count, size])))

    whole = graph.node(
        "Concat", apart(made_of, latent.rank), apart(turned, latent.shared_size), axis=-1
    )
    zeros = filled_size - latent.rows
    if zeros:
        pads = graph.constant(f"latent.pads_{zeros}", np.array([0] * 7 + [zeros]))
        whole = graph.node("Pad", whole, pads)
    flat = graph.constant(f"latent.flat_{count}", np.array([0, 0, count * filled_size]))
    return graph.node("Reshape", whole, flat)


def _pieces(graph: OnnxGraph, x: str, sizes: list[int]) -> tuple[str, ...]:
    """Neighbouring columns of x of these sizes."""
    name = f"latent.pieces_{len(sizes)}_{'_'.join(map(str, sizes[:3]))}"
    split = graph.constant(name, np.asarray(sizes, np.int64))
    return graph.nodes("Split", x, split, outputs=len(sizes), axis=-1)
