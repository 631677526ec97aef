"""Attention in a graph of checked operators: a context that is empty at first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.attention.onnx import (
    AttentionNames,
    CacheNames,
    attention,
    needs_positions,
    takes_counts,
)
from edge.kernels.kv_cache.cache_size import cache_row
from edge.kernels.latent_attention.onnx import LatentCache, latent_attention
from edge.kernels.latent_attention.reference import LatentForm
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import OnnxGraph
from edge.models.attention import Attention


def attention_face(
    cases: CaseGraph,
    part: Attention,
    epsilon: float,
    steps: Sequence[int],
    context: int,
    *,
    label: str,
) -> Callable[..., str]:
    """Rotary positions and attention in steps of so many tokens each, as a face with the arguments
    (graph, queries with keys and values, query norm, key norm, sinks). Adds its inputs to `cases`;
    label: a part of their names."""
    form = part.packed(epsilon)
    tables, turned = part.rotary.tables(context), form.turned_elements
    dtype, elements = cache_row(part.head_size, None)
    empty = np.zeros((1, part.num_kv_heads, context, elements), dtype)

    def same(name: str, array: NDArray[Any]) -> str:
        return cases.input(f"{name}.{label}", *[array] * len(steps))

    lengths, total = zip(*map(keys_of, steps), strict=True)
    positions = ""
    if needs_positions(form, cases.graph.provider):
        positions = cases.input(
            "positions", *(np.arange(rows, dtype=np.int64)[None] for rows in steps)
        )
    counts = ""
    if takes_counts(form, None, cases.graph.provider):
        counts = cases.input("counts", *(np.asarray([rows], np.int32) for rows in steps))
    names = AttentionNames(
        counts=counts,
        cos=same("cos", tables[0]) if turned else "",
        sin=same("sin", tables[1]) if turned else "",
        positions=positions,
        lengths=cases.input("lengths", *lengths),
        total=cases.input("total", *total),
    )
    cache = CacheNames(keys=same("keys", empty), values=same("values", empty))

    def face(
        graph: OnnxGraph, x: str, query_norm: str | None, key_norm: str | None, sinks: str | None
    ) -> str:
        norms = {"query_norm": query_norm, "key_norm": key_norm}
        return attention(graph, x, cache, names, form, sinks=sinks, **norms)[0]

    return face


def latent_face(
    cases: CaseGraph, form: LatentForm, steps: Sequence[int], context: int, *, label: str
) -> Callable[[OnnxGraph, str, str], str]:
    """Latent attention as a face with the arguments (graph, queries, rows); see
    `attention_face`."""
    lengths, total = zip(*map(keys_of, steps), strict=True)
    empty = np.zeros((1, 1, context, form.half_size), np.float32)
    halves = [cases.input(f"{half}.{label}", *[empty] * len(steps)) for half in ("first", "second")]
    cache = LatentCache(
        first=halves[0],
        second=halves[1],
        positions=cases.input("positions", *(np.arange(rows)[None] for rows in steps)),
        lengths=cases.input("lengths", *lengths),
        total=cases.input("total", *total),
        counts=cases.input("counts", *(np.asarray([rows], np.int32) for rows in steps))
        if cases.graph.provider.has_own_attention
        else "",
    )
    present = f"present_first.{label}", f"present_second.{label}"

    def face(graph: OnnxGraph, queries: str, rows: str) -> str:
        return latent_attention(graph, queries, rows, cache, form, present=present)

    return face


def keys_of(rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Attention's inputs for the last key, and for the number of keys."""
    return np.asarray([rows - 1], np.int32), np.asarray(rows, np.int32)
