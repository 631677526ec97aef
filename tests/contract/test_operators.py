"""Every face of every operator computes what its reference says.

A face is run as the product runs it: emitted into an OnnxGraph, through a real session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.host import block_kernels
from edge.kernels.activation import onnx as activation_onnx
from edge.kernels.activation import reference as activation_reference
from edge.kernels.attention import onnx as attention_onnx
from edge.kernels.attention.onnx import CacheNames
from edge.kernels.attention.reference import PackedAttention
from edge.kernels.cases import Case
from edge.kernels.experts import onnx as experts_onnx
from edge.kernels.experts import reference as experts_reference
from edge.kernels.experts.reference import SCORINGS, Routing
from edge.kernels.gated_mlp import onnx as gated_mlp_onnx
from edge.kernels.gated_mlp import reference as gated_mlp_reference
from edge.kernels.kv_cache.cache_size import cache_head_size
from edge.kernels.latent_attention import onnx as latent_onnx
from edge.kernels.latent_attention import reference as latent_reference
from edge.kernels.latent_attention.onnx import LatentCache
from edge.kernels.latent_attention.reference import LatentForm
from edge.kernels.layer_norm import onnx as layer_norm_onnx
from edge.kernels.layer_norm import reference as layer_norm_reference
from edge.kernels.linear_attention import onnx as linear_attention_onnx
from edge.kernels.linear_attention import reference as linear_attention_reference
from edge.kernels.logits import onnx as logits_onnx
from edge.kernels.logits import reference as logits_reference
from edge.kernels.matmul import onnx as matmul_onnx
from edge.kernels.matmul import reference as matmul_reference
from edge.kernels.matmul_nbits import onnx as matmul_nbits_onnx
from edge.kernels.matmul_nbits import reference as matmul_nbits_reference
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import CPU, OnnxGraph
from edge.kernels.rms_norm import onnx as rms_norm_onnx
from edge.kernels.rms_norm import reference as rms_norm_reference
from edge.kernels.rope import onnx as rope_onnx
from edge.kernels.rope import reference as rope_reference
from edge.kernels.short_convolution import onnx as short_convolution_onnx
from edge.kernels.short_convolution import reference as short_convolution_reference
from tests.support.operator_face import (
    FEW,
    PROVIDER,
    Array,
    assert_computed,
    assert_same,
    computed,
    normal,
    open_session,
    run_cases,
)
from tests.support.reference_model import rounded_activations

EPSILON = 1e-5
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)


@FEW
@given(seed=seeds, rows=sizes, columns=sizes, gain=st.sampled_from([0.0, 1e-4, 1.0, 300.0]))
def test_rms_norm(seed: int, rows: int, columns: int, gain: float) -> None:
    x, weight = gain * normal(seed, 1, rows, columns), normal(seed + 1, columns)
    formula = rms_norm_reference.rms_norm
    assert_computed(rms_norm_onnx.rms_norm, Case.of(formula, x, weights=(weight,), epsilon=EPSILON))


@FEW
@given(seed=seeds, rows=sizes, columns=sizes)
def test_add_rms_norm(seed: int, rows: int, columns: int) -> None:
    x, addend = normal(seed, 2, 1, rows, columns)
    formula, weights = rms_norm_reference.add_rms_norm, (normal(seed + 2, columns),)
    case = Case.of(formula, x, addend, weights=weights, epsilon=EPSILON)
    assert_computed(rms_norm_onnx.add_rms_norm, case)


@FEW
@given(seed=seeds, rows=sizes, columns=sizes, adds=st.booleans(), mean=st.sampled_from([0.0, 30.0]))
def test_layer_norm(seed: int, rows: int, columns: int, adds: bool, mean: float) -> None:
    """Also of rows whose mean is far from what is left without it."""
    x, addend = normal(seed, 2, 1, rows, columns)
    weights = normal(seed + 2, columns), normal(seed + 3, columns)
    inputs = (mean + x, addend) if adds else (mean + x,)
    face, formula = (
        (layer_norm_onnx.add_layer_norm, layer_norm_reference.add_layer_norm)
        if adds
        else (layer_norm_onnx.layer_norm, layer_norm_reference.layer_norm)
    )
    case = Case.of(formula, *inputs, weights=weights, epsilon=EPSILON)
    assert_computed(face, case, tolerance=1e-4)


def assert_in_place(
    face: Callable[..., Any], case: Case, *, num_states: int, cut: int, tolerance: float
) -> None:
    """The present states lie where the past ones were; where tokens are cut changes no bit.

    The last inputs are the states, and the last results those after the step.
    """
    graph = OnnxGraph("in place", PROVIDER)
    split = len(case.inputs) - num_states
    given, past = case.inputs[:split], case.inputs[split:]
    tokens = given[0].shape[1]
    names = [
        graph.input(f"x{n}", np.float32, ["batch", *(["tokens"] if n < split else []), *rest])
        for n, each in enumerate(case.inputs)
        for rest in (each.shape[2 if n < split else 1 :],)
    ]
    weights = [
        None if each is None else graph.weight(f"w{n}", each) for n, each in enumerate(case.weights)
    ]
    expected = case.expected()
    value, *present = face(graph, *names, *weights, **case.options)
    graph.output(value, "output", np.float32, ["batch", "tokens", expected[0].shape[2]])
    for number, (state, array) in enumerate(zip(present, past, strict=True)):
        graph.output(state, f"present{number}", np.float32, ["batch", *array.shape[1:]])
    session = open_session(graph)

    def run(*cuts: int) -> list[Array]:
        kept, outputs = [each.copy() for each in past], []
        for first, last in itertools.pairwise(cuts):
            parts = [np.ascontiguousarray(each[:, first:last]) for each in given]
            shape = (len(value_of), last - first, value_of.shape[2])
            output = np.zeros(shape, np.float32)
            binding = session.io_binding()
            for name, array in zip(names, (*parts, *kept), strict=True):
                binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            bound = ("output", output), *((f"present{n}", each) for n, each in enumerate(kept))
            for name, array in bound:
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            session.run_with_iobinding(binding)
            outputs.append(output)
        return [np.concatenate(outputs, axis=1), *kept]

    value_of = expected[0]
    found = run(0, tokens)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted, tolerance=tolerance)
    if 0 < cut < tokens:
        for whole, parts in zip(found, run(0, cut, tokens), strict=True):
            assert np.array_equal(whole, parts)


@FEW
@given(
    seed=seeds, batch=st.integers(1, 3), tokens=st.integers(1, 70), key_heads=st.integers(1, 4),
    each=st.integers(1, 3), key_size=st.integers(1, 33), value_size=st.integers(1, 33),
    width=st.integers(2, 5), cut=st.integers(0, 70),
)  # fmt: skip
def test_linear_attention(
    seed: int, batch: int, tokens: int, key_heads: int, each: int,
    key_size: int, value_size: int, width: int, cut: int,
) -> None:  # fmt: skip
    heads = key_heads * each
    channels = 2 * key_heads * key_size + heads * value_size
    case = Case.of(
        linear_attention_reference.linear_attention,
        normal(seed, batch, tokens, channels + heads * value_size),
        normal(seed + 1, batch, tokens, 2 * heads),
        normal(seed + 2, batch, width - 1, channels),
        normal(seed + 3, batch, heads, key_size, value_size),
        weights=(
            normal(seed + 4, channels * width), normal(seed + 5, heads), normal(seed + 6, heads),
            normal(seed + 7, value_size),
        ),
        unbatched=True, key_heads=key_heads, key_size=key_size, epsilon=EPSILON,
    )  # fmt: skip
    face = partial(
        linear_attention_onnx.linear_attention,
        value_heads=heads, value_size=value_size, width=width,
    )  # fmt: skip
    assert_in_place(face, case, num_states=2, cut=cut, tolerance=2e-5)


_HAS_LIBRARY = PROVIDER == CPU and block_kernels.library() is not None


def latent_steps(
    form: LatentForm, queries: Array, rows: Array, cuts: Sequence[int], *, threads: int = 1,
    context: int, batch: int = 1, by_nodes: bool = False,
) -> Array:  # fmt: skip
    """Mixed rows of requests that are alike, in steps from one of `cuts` to the next."""
    graph = OnnxGraph("latent", PROVIDER)
    shape: list[int | str] = ["batch", 1, "places", form.half_size]
    columns = form.num_heads * form.filled_size
    cache = LatentCache(
        first=graph.input("first", np.float32, shape),
        second=graph.input("second", np.float32, shape),
        positions=graph.input("positions", np.int64, ["batch", "tokens"]) if by_nodes else "",
        lengths=graph.input("lengths", np.int32, ["batch"])
        if PROVIDER != CPU or not by_nodes
        else "",
        total=graph.input("total", np.int32, []) if PROVIDER != CPU else "",
        counts="" if by_nodes else graph.input("counts", np.int32, ["batch"]),
    )
    mixed = latent_onnx.latent_attention(
        graph,
        graph.input("queries", np.float32, ["batch", "tokens", columns]),
        graph.input("rows", np.float32, ["batch", "tokens", form.filled_size]),
        cache, form, present=("present_first", "present_second"),
    )  # fmt: skip
    graph.output(mixed, "mixed", np.float32, ["batch", "tokens", columns])
    for name in ("present_first", "present_second"):
        graph.output(name, name, np.float32, shape)
    session = open_session(graph, threads=threads)
    halves = [np.zeros((batch, 1, context, form.half_size), np.float32) for _half in range(2)]
    found = []
    for begin, end in itertools.pairwise(cuts):
        feeds = {
            "first": halves[0], "second": halves[1],
            "queries": np.repeat(queries[None, begin:end], batch, axis=0),
            "rows": np.repeat(rows[None, begin:end], batch, axis=0),
            "positions": np.tile(np.arange(begin, end), (batch, 1)),
            "lengths": np.full(batch, end - 1, np.int32), "total": np.asarray(end, np.int32),
            "counts": np.full(batch, end - begin, np.int32),
        }  # fmt: skip
        feeds = {each.name: feeds[each.name] for each in session.get_inputs()}
        made, *halves = session.run(["mixed", "present_first", "present_second"], feeds)
        assert all(np.array_equal(each, made[0]) for each in made)
        found.append(made[0])
    whole = np.concatenate(halves, axis=-1)[:, 0]
    assert np.array_equal(whole[0, : len(rows)], rows), "each row lies at its place"
    return np.concatenate(found)


@FEW
@given(
    seed=seeds, tokens=st.integers(1, 80), cut=st.integers(0, 80), heads=st.integers(1, 30),
    row_size=st.integers(1, 40), batch=st.integers(1, 3), room=st.integers(0, 200),
)  # fmt: skip
def test_latent_attention(
    seed: int, tokens: int, cut: int, heads: int, row_size: int, batch: int, room: int
) -> None:
    """In one step and in two, of one request and of several that are alike."""
    form = LatentForm(num_heads=heads, row_size=row_size, scale=0.3)
    queries = normal(seed, tokens, heads * form.filled_size)
    rows = normal(seed + 1, tokens, form.filled_size)
    expected = latent_reference.latent_attention(queries, rows, form=form)
    cuts = sorted({0, min(cut, tokens), tokens})
    batch = batch if PROVIDER == CPU else 1
    steps = partial(latent_steps, form, queries, rows, cuts, context=tokens + room, batch=batch)
    for by_nodes in (False, True) if _HAS_LIBRARY else (True,):
        assert_same(steps(by_nodes=by_nodes), expected, tolerance=1e-5)


@pytest.mark.skipif(not _HAS_LIBRARY, reason="it is a promise of the library")
def test_latent_attention_of_a_row_has_the_same_bits_in_any_step() -> None:
    """Of the sizes of GLM-4.7-Flash, with one thread and with several, over two parts of keys."""
    form = LatentForm(num_heads=20, row_size=576, scale=1 / 16)
    queries = normal(0, 700, form.num_heads * form.filled_size)
    rows = normal(1, 700, form.filled_size)
    steps = partial(latent_steps, form, queries, rows, context=750)
    whole = steps([0, 700])
    expected = latent_reference.latent_attention(queries, rows, form=form)
    assert_same(whole, expected, tolerance=1e-5)
    for threads, *cuts in ([1, 0, 2, 6, 20, 700], [4, 0, 100, 699, 700], [2, 0, 32, 640, 641, 700]):
        assert np.array_equal(steps(cuts, threads=threads), whole)


@FEW
@given(
    seed=seeds, tokens=st.integers(1, 40), channels=st.integers(1, 40), width=st.integers(2, 5),
    cut=st.integers(0, 40), has_bias=st.booleans(),
)  # fmt: skip
def test_short_convolution(
    seed: int, tokens: int, channels: int, width: int, cut: int, has_bias: bool
) -> None:
    bias = normal(seed + 3, channels) if has_bias else None
    case = Case.of(
        short_convolution_reference.short_convolution,
        normal(seed, 1, tokens, 3 * channels),
        normal(seed + 1, 1, width - 1, channels),
        weights=(normal(seed + 2, channels * width), bias),
        unbatched=True,
    )
    face = partial(short_convolution_onnx.short_convolution, channels=channels, width=width)
    assert_in_place(face, case, num_states=1, cut=cut, tolerance=1e-5)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 9), hidden=st.integers(1, 9), count=st.integers(1, 12),
    groups=st.sampled_from([1, 1, 2, 3]), is_corrected=st.booleans(), is_scaled=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_experts(
    seed: int, rows: int, hidden: int, count: int, groups: int, is_corrected: bool,
    is_scaled: bool, data: st.DataObject,
) -> None:  # fmt: skip
    """Also where nobody chooses some of them, and where all choose the same."""
    count = count if groups == 1 else groups * (2 + count % 4)
    chosen = data.draw(st.integers(1, groups))
    routing = Routing(
        top_k=data.draw(st.integers(1, count // groups * chosen)),
        renormalized=data.draw(st.booleans()),
        scoring=data.draw(st.sampled_from(SCORINGS)),
        groups=groups,
        chosen_groups=chosen,
        scale=data.draw(st.sampled_from([1.0, 2.5])),
        least_sum=data.draw(st.sampled_from([0.0, 0.1])),
    )
    own = 0.1 * normal(seed + 3, count) if is_corrected else None
    scales = normal(seed + 4, count) if is_scaled else None
    weights = normal(seed + 2, count, hidden, hidden)

    def product(branch: OnnxGraph, number: int, x: str) -> str:
        return matmul(branch, x, branch.weight(f"w.{number}", weights[number]))

    formula = partial(
        experts_reference.experts,
        expert=lambda number, x: matmul_reference.matmul(x, weights[number]),
    )
    x, logits = normal(seed, 1, rows, hidden), normal(seed + 1, 1, rows, count)
    case = Case.of(formula, x, logits, weights=(own, scales), unbatched=True, routing=routing)
    face = partial(experts_onnx.experts, hidden_size=hidden, num_experts=count, expert=product)
    assert_computed(face, case)


def stacked_experts(
    seed: int, x: Array, logits: Array, routing: Routing, *, columns: int, bits: int,
    threads: int = 1,
) -> tuple[Array, Array]:  # fmt: skip
    """Of one node, and of the formula with the weights that its codes stand for."""
    hidden, count = x.shape[-1], logits.shape[-1]
    shapes = {"gate_up": (2 * columns, hidden), "down": (hidden, columns)}
    matrices = {
        name: [
            matmul_nbits_reference.quantize(
                normal(seed + number, *shape) / shape[1] ** 0.5, bits=bits, block_size=32
            )
            for number in range(count)
        ]
        for name, shape in shapes.items()
    }

    def face(graph: OnnxGraph, x: str, logits: str, *, routing: Routing) -> str:
        def weight(name: str, array: str) -> str:
            each = [getattr(matrix, array) for matrix in matrices[name]]
            if name == "gate_up":
                each = [experts_onnx.in_turn(rows) for rows in each]
            flat = np.stack([rows.reshape(len(rows), -1) for rows in each])
            return graph.weight(f"{name}.{array}", flat)

        stacked = experts_onnx.StackedWeights(
            gate_up_codes=weight("gate_up", "codes"), gate_up_scales=weight("gate_up", "scales"),
            down_codes=weight("down", "codes"), down_scales=weight("down", "scales"),
            bits=bits, block_size=32,
        )  # fmt: skip
        return experts_onnx.stacked_experts(
            graph, x, logits, hidden_size=hidden, num_experts=count, routing=routing,
            stacked=stacked,
        )  # fmt: skip

    gate_up, down = (
        list(map(matmul_nbits_reference.dequantize, each)) for each in matrices.values()
    )

    def expert(number: int, rows: Array) -> Array:
        active = gated_mlp_reference.gated(rows @ gate_up[number].T, activation="silu")
        return np.asarray(active @ down[number].T)

    formula = partial(experts_reference.experts, expert=expert)
    case = Case.of(formula, x, logits, unbatched=True, routing=routing)
    return computed(face, case, threads=threads)[0], case.expected()[0]


@FEW
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    blocks=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    count=st.integers(1, 12),
    bits=st.sampled_from([4, 8]),
    gain=st.sampled_from([1, 100]),
    threads=st.integers(1, 2),
    data=st.data(),
)
def test_experts_in_one_node(
    seed: int,
    rows: int,
    blocks: tuple[int, int],
    count: int,
    bits: int,
    gain: int,
    threads: int,
    data: st.DataObject,
) -> None:
    """As far off as a product whose inputs are rounded to 8 bits, and another one behind it; also
    with gates that other models' are clamped at."""
    hidden, columns = (32 * each for each in blocks)
    routing = Routing(
        top_k=data.draw(st.integers(1, count)),
        renormalized=data.draw(st.booleans()),
        scoring=data.draw(st.sampled_from(SCORINGS)),
    )
    x, logits = gain * normal(seed, 1, rows, hidden), normal(seed + 1, 1, rows, count)
    found, expected = stacked_experts(
        seed, x, logits, routing, columns=columns, bits=bits, threads=threads
    )
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 0.03


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_row_gets_of_experts_in_one_node_does_not_depend_on_the_others(threads: int) -> None:
    """In steps of an even number of rows, whatever these choose."""
    x, logits = normal(0, 1, 8, 96), normal(1, 1, 8, 6)
    routing = Routing(top_k=3, renormalized=True)

    def rows(some: Sequence[int]) -> Array:
        given = np.ascontiguousarray(x[:, some]), np.ascontiguousarray(logits[:, some])
        return stacked_experts(2, *given, routing, columns=64, bits=4, threads=threads)[0]

    whole = rows(range(8))
    for some in ((0, 1), (3, 6), (7, 2, 0, 4)):
        assert np.array_equal(rows(some), whole[:, some])


@FEW
@given(
    seed=seeds, tokens=st.integers(1, 9), num_heads=st.integers(1, 5),
    sizes=st.sampled_from([(2, 2), (6, 6), (16, 8), (20, 6), (24, 24), (64, 32)]),
    interleaved=st.booleans(), position=st.integers(0, 40),
)  # fmt: skip
def test_rope(
    seed: int, tokens: int, num_heads: int, sizes: tuple[int, int], interleaved: bool,
    position: int,
) -> None:  # fmt: skip
    """Of whole heads, and of their first elements."""
    head_size, turned = sizes
    cos, sin = tables(turned, position + tokens)

    def formula(x: Array, positions: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
        heads = x[0].reshape(tokens, num_heads, head_size)
        at = positions[0]
        turned = rope_reference.rope(heads, cos[at], sin[at], interleaved=interleaved)
        return turned.reshape(x.shape)

    case = Case.of(
        formula,
        normal(seed, 1, tokens, num_heads * head_size),
        np.arange(position, position + tokens)[None],
        weights=(cos, sin),
        interleaved=interleaved,
    )
    assert_computed(partial(rope_onnx.rope, num_heads=num_heads, turned_elements=turned), case)


def tables(head_size: int, length: int) -> tuple[Array, Array]:
    frequencies = 100.0 ** -(np.arange(0, head_size, 2) / max(head_size, 1))
    return rope_reference.rope_tables(frequencies.astype(np.float32), length=length)


@settings(FEW, max_examples=300)
@given(
    seed=seeds, position=st.integers(0, 20), tokens=st.sampled_from([1, 1, 2, 5, 20]),
    room=st.integers(0, 5), is_own=st.booleans(),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 2), (5, 1), (6, 1)]),
    sizes=st.sampled_from(
        [(2, 2), (16, 16), (16, 0), (20, 20), (20, 8), (24, 24), (64, 64), (64, 32), (64, 24)]
    ),
    interleaved=st.booleans(), window=st.sampled_from([None, 1, 2, 5, 16]),
    scaling=st.sampled_from([(None, None), (0.4, None), (None, 0.7), (2.0, 5.0)]),
    normed=st.booleans(), has_sinks=st.booleans(), gated=st.booleans(), value_norm=st.booleans(),
)  # fmt: skip
def test_attention(
    seed: int, position: int, tokens: int, room: int, heads: tuple[int, int],
    sizes: tuple[int, int], interleaved: bool, window: int | None,
    scaling: tuple[float | None, float | None], normed: bool, has_sinks: bool, gated: bool,
    value_norm: bool, is_own: bool,
) -> None:  # fmt: skip
    """A whole prompt (position 0), a later chunk of it, and decoding (one token). is_own: with the
    operator of kernels/native, where there is one."""
    num_kv_heads, head_size, turned = heads[1], *sizes
    form = PackedAttention(
        num_heads=heads[0], num_kv_heads=num_kv_heads, head_size=head_size, turned_elements=turned,
        interleaved=interleaved, scale=scaling[0], window=window, soft_cap=scaling[1],
        value_norm=value_norm, gated=gated, epsilon=EPSILON,
    )  # fmt: skip
    context, end = position + tokens + room, position + tokens
    past = normal(seed + 1, 2, position, num_kv_heads, head_size)
    norms = tuple(normal(seed + 2, 2, head_size)) if normed else (None, None)
    sinks = 2 * normal(seed + 3, heads[0]) if has_sinks else None
    cos, sin = tables(turned, context)
    caches = np.full((2, 1, num_kv_heads, context, cache_head_size(head_size)), 7.0, np.float32)
    caches[:, 0, :, :position] = 0.0
    caches[:, 0, :, :position, :head_size] = past.transpose(0, 2, 1, 3)

    def formula(qkv: Array, *_caches: Array) -> tuple[Array, Array, Array]:
        angles = cos[position:end], sin[position:end]
        made = form.heads(qkv[0], *angles, norms if normed else None)
        keys, values = (
            np.concatenate([old, new])
            for old, new in zip(past, (made.keys, made.values), strict=True)
        )
        presents = caches.copy()
        presents[:, 0, :, :end, :head_size] = np.stack([keys, values]).transpose(0, 2, 1, 3)
        output = form.attend(replace(made, keys=keys, values=values), sinks)
        return output[None], *presents

    def face(graph: OnnxGraph, qkv: str, keys: str, values: str) -> tuple[str, ...]:
        inputs = CacheNames(keys=keys, values=values)
        own = [None if each is None else graph.weight(f"w{n}", each) for n, each in given]
        return attention_onnx.attention(
            graph, qkv, inputs, names, form, query_norm=own[0], key_norm=own[1], sinks=own[2]
        )

    given = [*enumerate((*norms, sinks))]
    is_own &= PROVIDER == CPU and block_kernels.library() is not None
    graph = CaseGraph(provider=replace(PROVIDER, has_own_attention=is_own))
    places = attention_onnx.needs_positions(form, graph.graph.provider)
    names = attention_onnx.AttentionNames(
        cos=graph.input("cos", cos) if turned else "",
        sin=graph.input("sin", sin) if turned else "",
        positions=graph.input("positions", np.arange(position, end)[None]) if places else "",
        lengths=graph.input("lengths", np.asarray([end - 1], np.int32)),
        total=graph.input("total", np.asarray(end, np.int32)),
    )
    case = Case.of(formula, normal(seed, 1, tokens, form.columns), *caches)
    graph.add("", face, case)
    found, wanted = run_cases(graph), case.expected()
    assert_same(found[0], wanted[0], tolerance=5e-6)
    for present, expected in zip(found[1:], wanted[1:], strict=True):
        assert_same(present[:, :, :end, :head_size], expected[:, :, :end, :head_size])


@FEW
@given(
    seed=seeds, rows=sizes, columns=sizes, gain=st.sampled_from([0.0, 1.0, 100.0]),
    activation=st.sampled_from(activation_reference.ACTIVATIONS),
)  # fmt: skip
def test_activated(seed: int, rows: int, columns: int, gain: float, activation: Any) -> None:
    x = gain * normal(seed, 1, rows, columns)
    case = Case.of(activation_reference.activated, x, activation=activation)
    assert_computed(activation_onnx.activated, case, tolerance=1e-5)


@FEW
@given(
    seed=seeds, rows=sizes, columns=sizes, gain=st.sampled_from([0.0, 1.0, 100.0]),
    activation=st.sampled_from([*activation_reference.ACTIVATIONS, "clamped"]),
)  # fmt: skip
def test_gated(seed: int, rows: int, columns: int, gain: float, activation: Any) -> None:
    """Also where e^−x overflows float32."""
    clamp = None
    if activation == "clamped":
        activation, clamp = "silu", gated_mlp_reference.Clamp(limit=0.8, slope=1.7)
    x = gain * normal(seed, 1, rows, 2 * columns)
    case = Case.of(gated_mlp_reference.gated, x, activation=activation, clamp=clamp)
    assert_computed(gated_mlp_onnx.gated, case, tolerance=1e-5)


@FEW
@given(
    seed=seeds, rows=sizes, columns=sizes, scale=st.sampled_from([1.0, 0.125, 7.0]),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
)  # fmt: skip
def test_finish_logits(
    seed: int, rows: int, columns: int, scale: float, soft_cap: float | None
) -> None:
    x = 20 * normal(seed, 1, rows, columns)
    case = Case.of(logits_reference.finish_logits, x, scale=scale, soft_cap=soft_cap)
    assert_computed(logits_onnx.finish_logits, case)


@FEW
@given(seed=seeds, tokens=st.integers(1, 9), rows=sizes, columns=sizes)
def test_matmul(seed: int, tokens: int, rows: int, columns: int) -> None:
    weights = (normal(seed + 1, rows, columns),)
    case = Case.of(matmul_reference.matmul, normal(seed, 1, tokens, columns), weights=weights)
    assert_computed(matmul, case, tolerance=1e-5)


def matmul(graph: OnnxGraph, x: str, weight: str) -> str:
    """The face, of a weight [outputs, inputs]."""
    return matmul_onnx.matmul(graph, x, as_taken(graph, weight))


def as_taken(graph: OnnxGraph, weight: str) -> str:
    """A weight [outputs, inputs] as products of the provider take it."""
    return graph.node("Transpose", weight) if graph.provider.is_webgpu else weight


nbits_forms = st.sampled_from(
    [
        (bits, size)
        for bits in matmul_nbits_reference.SUPPORTED_BITS
        for size in (16, 32, 64, 128)
        if size >= matmul_nbits_reference.LEAST_BLOCK[bits]
    ]
)
"""Bits and block size."""


@settings(FEW, max_examples=4 * FEW.max_examples)
@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    rows=sizes,
    columns=st.integers(1, 300),
    form=nbits_forms,
    accuracy=st.sampled_from(["fast", "high"] if PROVIDER == CPU else ["high"]),
    has_zeros=st.booleans(),
    has_offsets=st.booleans(),
    data=st.data(),
)
def test_matmul_nbits(
    seed: int,
    tokens: int,
    rows: int,
    columns: int,
    form: tuple[int, int],
    accuracy: matmul_nbits_reference.Accuracy,
    has_zeros: bool,
    has_offsets: bool,
    data: st.DataObject,
) -> None:
    """Any run of a matrix's columns, widened on the left as `slice_columns` asks.

    With "fast" the reference rounds the activations as the operator does, so the bound is that of
    float32; WebGPU's operator rounds them in other blocks, or not. With "high" the reference does
    not round them.
    """
    bits, block_size = form
    start = data.draw(st.integers(0, columns - 1), label="start")
    stop = data.draw(st.integers(start + 1, columns), label="stop")
    weight = normal(seed, rows, columns)
    matrix = matmul_nbits_reference.quantize(
        weight, bits=bits, block_size=block_size, zero_points=has_zeros
    )
    codes_alone = matmul_nbits_reference.dequantize(matrix)[:, start:stop]
    if has_offsets:
        matrix = replace(matrix, offsets=normal(seed + 2, *matrix.scales.shape))
    part, padding = matmul_nbits_reference.slice_columns(matrix, range(start, stop))
    x = normal(seed + 1, 1, tokens, stop - start)
    padded = np.pad(x, [(0, 0), (0, 0), (padding, 0)])
    actual = nbits_product(padded, part, accuracy)

    whole = matmul_nbits_reference.dequantize(matrix)[:, start:stop]
    if accuracy == "fast":
        rounded = rounded_activations(padded, block_size)[..., padding:]
        expected = matmul_reference.matmul(rounded, codes_alone)
        expected += matmul_reference.matmul(x, whole - codes_alone)
        assert_same(actual, expected, tolerance=1e-5)
    else:
        assert_highly_accurate(actual, x, whole, block_size)


@settings(FEW, max_examples=2 * FEW.max_examples)
@given(
    seed=seeds,
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    form=nbits_forms,
    columns=st.integers(1, 300),
    gain=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
)
def test_matmul_nbits_of_uneven_activations(
    seed: int,
    batch: int,
    tokens: int,
    form: tuple[int, int],
    columns: int,
    gain: float,
) -> None:
    """High accuracy with blocks of zeros and with values that dwarf their neighbours."""
    bits, block_size = form
    draw = np.random.default_rng(seed)
    matrix = matmul_nbits_reference.quantize(
        normal(seed, 9, columns), bits=bits, block_size=block_size
    )
    x = np.float32(gain) * normal(seed + 1, batch, tokens, columns)
    x *= draw.choice(np.array([0, 1e-3, 1, 1000], np.float32), x.shape, p=[0.3, 0.3, 0.35, 0.05])
    x[..., : block_size * int(draw.integers(3))] = 0
    whole = matmul_nbits_reference.dequantize(matrix)
    assert_highly_accurate(nbits_product(x, matrix, "high"), x, whole, block_size)


@pytest.mark.parametrize("bits", matmul_nbits_reference.SUPPORTED_BITS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_what_accuracy_buys(bits: int, tokens: int) -> None:
    """The figures that `Cluster.load` states."""
    matrix = matmul_nbits_reference.quantize(normal(3, 200, 1000), bits=bits, block_size=32)
    x = normal(4, 1, tokens, 1000)
    exact = matmul_nbits_reference.matmul(x, matrix)

    def error(accuracy: matmul_nbits_reference.Accuracy) -> float:
        difference = nbits_product(x, matrix, accuracy) - exact
        return float(np.linalg.norm(difference) / np.linalg.norm(exact))

    assert 4e-3 < error("fast") < 7e-3
    assert error("high") < 4e-5


def nbits_product(
    x: Array,
    matrix: matmul_nbits_reference.QuantizedMatrix,
    accuracy: matmul_nbits_reference.Accuracy,
) -> Array:
    rows, columns = matrix.shape
    zeros = matrix.zero_points
    if zeros is not None:
        zeros = matmul_nbits_reference.pack_zero_points(zeros, matrix.bits)
    case = Case.of(
        lambda x, *_arrays, **_options: matmul_nbits_reference.matmul(x, matrix),
        x,
        weights=(matrix.codes, matrix.scales, zeros, matrix.offsets),
        rows=rows,
        columns=columns,
        bits=matrix.bits,
        block_size=matrix.block_size,
        accuracy=accuracy,
    )

    def face(
        graph: OnnxGraph, x: str, codes: str, scales: str, zeros: str | None, offsets: str | None,
        **options: Any,
    ) -> str:  # fmt: skip
        taken = None if offsets is None else as_taken(graph, offsets)
        return matmul_nbits_onnx.matmul_nbits(graph, x, codes, scales, zeros, taken, **options)

    return computed(face, case)[0]


def assert_highly_accurate(actual: Array, x: Array, weight: Array, block_size: int) -> None:
    """Within what rounding twice can lose at the very worst, and the operator's float32 error.

    A remainder is at most peak / 254 and rounded by at most 1 / 254 of that, so a block's error
    vector has the norm √block_size · peak / 254², at most √block_size / 254² of the block's norm.
    That is 0.6e-4 (16) to 1.8e-4 (128) of |x| |w|. The float32 error is also that of the zero
    code's products, which cancel.
    """
    expected = matmul_reference.matmul(x, weight)
    x_norm = np.linalg.norm(x, axis=-1)[..., None]
    size = x_norm * np.linalg.norm(weight, axis=-1)
    float_error = 2e-6 * (size + x_norm)
    assert actual.dtype == np.float32
    assert (np.abs(actual - expected) <= block_size**0.5 / 254**2 * size + float_error).all()
