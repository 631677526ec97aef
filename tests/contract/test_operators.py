"""Every face of every operator computes what its reference says.

A face is run as the product runs it: emitted into an OnnxGraph, through a real session.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.kernels.activation import onnx as activation_onnx
from edge.kernels.activation import reference as activation_reference
from edge.kernels.attention import onnx as attention_onnx
from edge.kernels.attention import reference as attention_reference
from edge.kernels.experts import onnx as experts_onnx
from edge.kernels.experts import reference as experts_reference
from edge.kernels.experts.reference import SCORINGS, Routing
from edge.kernels.gated_mlp import onnx as gated_mlp_onnx
from edge.kernels.gated_mlp import reference as gated_mlp_reference
from edge.kernels.kv_cache.cache_size import cache_head_size
from edge.kernels.latent_heads import onnx as latent_heads_onnx
from edge.kernels.latent_heads import reference as latent_heads_reference
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
from edge.kernels.onnx_graph import OnnxGraph
from edge.kernels.rms_norm import onnx as rms_norm_onnx
from edge.kernels.rms_norm import reference as rms_norm_reference
from edge.kernels.rope import onnx as rope_onnx
from edge.kernels.rope import reference as rope_reference
from edge.kernels.short_convolution import onnx as short_convolution_onnx
from edge.kernels.short_convolution import reference as short_convolution_reference
from tests.support.operator_face import Array, Face, assert_same, normal
from tests.support.reference_model import rounded_activations

FEW = settings(max_examples=50)
EPSILON = 1e-5
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)


@FEW
@given(seed=seeds, rows=sizes, columns=sizes, gain=st.sampled_from([0.0, 1e-4, 1.0, 300.0]))
def test_rms_norm(seed: int, rows: int, columns: int, gain: float) -> None:
    x, weight = gain * normal(seed, 1, rows, columns), normal(seed + 1, columns)
    face = Face()
    y = rms_norm_onnx.rms_norm(
        face.graph, face.input("x", x), face.graph.weight("w", weight), epsilon=EPSILON
    )
    face.output(y, x.shape)
    expected = rms_norm_reference.rms_norm(x, weight, epsilon=EPSILON)
    assert_same(face.run()[0], expected)


@FEW
@given(seed=seeds, rows=sizes, columns=sizes)
def test_add_rms_norm(seed: int, rows: int, columns: int) -> None:
    x, addend = normal(seed, 1, rows, columns), normal(seed + 1, 1, rows, columns)
    weight = normal(seed + 2, columns)
    face = Face()
    names = face.input("x", x), face.input("addend", addend), face.graph.weight("w", weight)
    for value in rms_norm_onnx.add_rms_norm(face.graph, *names, epsilon=EPSILON):
        face.output(value, x.shape)
    expected = rms_norm_reference.add_rms_norm(x, addend, weight, epsilon=EPSILON)
    for actual, wanted in zip(face.run(), expected, strict=True):
        assert_same(actual, wanted)


@FEW
@given(
    seed=seeds,
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    shared=st.integers(1, 6),
    own=st.integers(1, 6),
    data=st.data(),
)
def test_latent_heads(
    seed: int, batch: int, tokens: int, heads: int, shared: int, own: int, data: st.DataObject
) -> None:
    values = data.draw(st.integers(1, shared + own))
    product = normal(seed, batch, tokens, heads * (own + values))
    turned = normal(seed + 1, batch, tokens, shared)
    face = Face()
    found = latent_heads_onnx.latent_heads(
        face.graph, face.input("product", product), face.input("shared", turned),
        num_heads=heads, own_size=own, shared_size=shared, value_size=values,
    )  # fmt: skip
    expected = latent_heads_reference.latent_heads(product, turned, num_heads=heads, own_size=own)
    face.output(found, expected.shape)
    assert_same(face.run()[0], expected)


@FEW
@given(seed=seeds, rows=sizes, columns=sizes, adds=st.booleans(), mean=st.sampled_from([0.0, 30.0]))
def test_layer_norm(seed: int, rows: int, columns: int, adds: bool, mean: float) -> None:
    """Also of rows whose mean is far from what is left without it."""
    x, addend = mean + normal(seed, 1, rows, columns), normal(seed + 1, 1, rows, columns)
    weight, bias = normal(seed + 2, columns), normal(seed + 3, columns)
    face = Face()
    arrays = face.graph.weight("w", weight), face.graph.weight("b", bias)
    given_x = face.input("x", x)
    values: tuple[str, ...]
    expected: tuple[np.ndarray, ...]
    if adds:
        values = layer_norm_onnx.add_layer_norm(
            face.graph, given_x, face.input("addend", addend), *arrays, epsilon=EPSILON
        )
        expected = layer_norm_reference.add_layer_norm(x, addend, weight, bias, epsilon=EPSILON)
    else:
        values = (layer_norm_onnx.layer_norm(face.graph, given_x, *arrays, epsilon=EPSILON),)
        expected = (layer_norm_reference.layer_norm(x, weight, bias, epsilon=EPSILON),)
    for value in values:
        face.output(value, x.shape)
    for actual, wanted in zip(face.run(), expected, strict=True):
        assert_same(actual, wanted, tolerance=1e-4)


@FEW
@given(
    seed=seeds,
    batch=st.integers(1, 3),
    tokens=st.integers(1, 70),
    key_heads=st.integers(1, 4),
    each=st.integers(1, 3),
    key_size=st.integers(1, 33),
    value_size=st.integers(1, 33),
    width=st.integers(2, 5),
    cut=st.integers(0, 70),
)
def test_linear_attention(
    seed: int, batch: int, tokens: int, key_heads: int, each: int,
    key_size: int, value_size: int, width: int, cut: int,
) -> None:  # fmt: skip
    """The present states lie where the past ones were; where tokens are cut changes no bit."""
    value_heads = key_heads * each
    channels, values = 2 * key_heads * key_size + value_heads * value_size, value_heads * value_size
    mixed = normal(seed, batch, tokens, channels + values)
    gates = normal(seed + 1, batch, tokens, 2 * value_heads)
    past = (
        normal(seed + 2, batch, width - 1, channels),
        normal(seed + 3, batch, value_heads, key_size, value_size),
    )
    convolution = normal(seed + 4, channels, width)
    bias, rate, scale = (
        normal(seed + n, s) for n, s in ((5, value_heads), (6, value_heads), (7, value_size))
    )
    graph = OnnxGraph("linear")
    weights = linear_attention_onnx.LinearWeights(
        graph.weight("convolution", convolution.reshape(-1)),
        *(graph.weight(name, x) for name, x in (("bias", bias), ("rate", rate), ("scale", scale))),
    )
    shapes: dict[str, list[int | str]] = {
        "mixed": ["batch", "tokens", channels + values],
        "gates": ["batch", "tokens", 2 * value_heads],
        "channels": ["batch", *past[0].shape[1:]],
        "state": ["batch", *past[1].shape[1:]],
    }
    names = [graph.input(name, np.float32, shape) for name, shape in shapes.items()]
    results = linear_attention_onnx.linear_attention(
        graph, names[0], names[1], (names[2], names[3]), weights,
        key_heads=key_heads, value_heads=value_heads, key_size=key_size, value_size=value_size,
        convolution=width, epsilon=EPSILON,
    )  # fmt: skip
    made: list[list[int | str]] = [["batch", "tokens", values], shapes["channels"], shapes["state"]]
    outputs = ("output", "present_channels", "present_state")
    for value, name, shape in zip(results, outputs, made, strict=True):
        graph.output(value, name, np.float32, shape)
    session = ort.InferenceSession(graph.build(), providers=["CPUExecutionProvider"])

    def run(*cuts: int) -> list[Array]:
        kept, outputs = [each.copy() for each in past], []
        for first, last in itertools.pairwise(cuts):
            given = [np.ascontiguousarray(each[:, first:last]) for each in (mixed, gates)]
            output = np.zeros((batch, last - first, values), np.float32)
            binding = session.io_binding()
            places = [*zip(shapes, (*given, *kept), strict=True)]
            for name, array in places:
                binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            for name, array in (
                ("output", output), ("present_channels", kept[0]), ("present_state", kept[1])
            ):  # fmt: skip
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            session.run_with_iobinding(binding)
            outputs.append(output)
        return [np.concatenate(outputs, axis=1), *kept]

    found = run(0, tokens)
    for row in range(batch):
        channel_rows, gate = np.split(mixed[row], [channels], axis=-1)
        decay, beta = np.split(gates[row], 2, axis=-1)
        output, present = linear_attention_reference.linear_attention(
            channel_rows, gate, decay, beta, past=(past[0][row], past[1][row]),
            convolution=convolution, decay_bias=bias, decay_rate=rate, scale=scale,
            key_heads=key_heads, key_size=key_size, epsilon=EPSILON,
        )  # fmt: skip
        for actual, expected in zip(found, (output, *present), strict=True):
            assert_same(actual[row], expected, tolerance=2e-5)
    if cut < tokens and cut:
        for whole, parts in zip(found, run(0, cut, tokens), strict=True):
            assert np.array_equal(whole, parts)


@FEW
@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    channels=st.integers(1, 40),
    width=st.integers(2, 5),
    cut=st.integers(0, 40),
    has_bias=st.booleans(),
)
def test_short_convolution(
    seed: int, tokens: int, channels: int, width: int, cut: int, has_bias: bool
) -> None:
    """The present state lies where the past one was; where tokens are cut changes no bit."""
    mixed = normal(seed, 1, tokens, 3 * channels)
    past, convolution = normal(seed + 1, width - 1, channels), normal(seed + 2, channels, width)
    bias = normal(seed + 3, channels) if has_bias else None
    graph = OnnxGraph("short")
    state: list[int | str] = [1, width - 1, channels]
    value, present = short_convolution_onnx.short_convolution(
        graph,
        graph.input("mixed", np.float32, [1, "tokens", 3 * channels]),
        graph.input("past", np.float32, state),
        graph.weight("convolution", convolution.reshape(-1)),
        channels=channels,
        width=width,
        bias=None if bias is None else graph.weight("bias", bias),
    )
    graph.output(value, "output", np.float32, [1, "tokens", channels])
    graph.output(present, "present", np.float32, state)
    session = ort.InferenceSession(graph.build(), providers=["CPUExecutionProvider"])

    def run(*cuts: int) -> tuple[Array, Array]:
        kept, outputs = past[None].copy(), []
        for first, last in itertools.pairwise(cuts):
            given = np.ascontiguousarray(mixed[:, first:last])
            output = np.zeros((1, last - first, channels), np.float32)
            binding = session.io_binding()
            for name, array in (("mixed", given), ("past", kept)):
                binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            for name, array in (("output", output), ("present", kept)):
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            session.run_with_iobinding(binding)
            outputs.append(output)
        return np.concatenate(outputs, axis=1), kept

    found = run(0, tokens)
    wanted = short_convolution_reference.short_convolution(
        *np.split(mixed[0], 3, axis=-1), past=past, convolution=convolution, bias=bias
    )
    for actual, expected in zip(found, wanted, strict=True):
        assert_same(actual[0], expected, tolerance=1e-5)
    if 0 < cut < tokens:
        for whole, parts in zip(found, run(0, cut, tokens), strict=True):
            assert np.array_equal(whole, parts)


@FEW
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    hidden=st.integers(1, 9),
    count=st.integers(1, 12),
    groups=st.sampled_from([1, 1, 2, 3]),
    is_corrected=st.booleans(),
    is_scaled=st.booleans(),
    data=st.data(),
)
def test_experts(
    seed: int,
    rows: int,
    hidden: int,
    count: int,
    groups: int,
    is_corrected: bool,
    is_scaled: bool,
    data: st.DataObject,
) -> None:
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
    x, logits = normal(seed, 1, rows, hidden), normal(seed + 1, 1, rows, count)
    weights = normal(seed + 2, count, hidden, hidden)
    face = Face()
    names = face.input("x", x), face.input("logits", logits)

    def product(branch: OnnxGraph, number: int, x: str) -> str:
        return matmul_onnx.matmul(branch, x, branch.weight(f"w{number}", weights[number]))

    y = experts_onnx.experts(
        face.graph, *names, hidden_size=hidden, num_experts=count, routing=routing,
        expert=product, correction=None if own is None else face.graph.weight("own", own),
        scales=None if scales is None else face.graph.weight("scales", scales),
    )  # fmt: skip
    face.output(y, x.shape)
    expected = experts_reference.experts(
        x[0], logits[0], routing, correction=own, scales=scales,
        expert=lambda number, x: matmul_reference.matmul(x, weights[number]),
    )  # fmt: skip
    assert_same(face.run()[0], expected[None])


def stacked_experts(
    seed: int,
    x: Array,
    logits: Array,
    routing: Routing,
    *,
    columns: int,
    bits: int,
    threads: int = 1,
) -> tuple[Array, Array]:
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
    face = Face()

    def weight(name: str, array: str) -> str:
        each = [getattr(matrix, array) for matrix in matrices[name]]
        if name == "gate_up":
            each = [experts_onnx.in_turn(rows) for rows in each]
        flat = np.stack([rows.reshape(len(rows), -1) for rows in each])
        return face.graph.weight(f"{name}.{array}", flat)

    stacked = experts_onnx.StackedWeights(
        gate_up_codes=weight("gate_up", "codes"), gate_up_scales=weight("gate_up", "scales"),
        down_codes=weight("down", "codes"), down_scales=weight("down", "scales"),
        bits=bits, block_size=32,
    )  # fmt: skip
    y = experts_onnx.stacked_experts(
        face.graph, face.input("x", x), face.input("logits", logits), hidden_size=hidden,
        num_experts=count, routing=routing, stacked=stacked,
    )  # fmt: skip
    face.output(y, x.shape)
    gate_up, down = (
        list(map(matmul_nbits_reference.dequantize, each)) for each in matrices.values()
    )

    def expert(number: int, rows: Array) -> Array:
        active = gated_mlp_reference.gated(rows @ gate_up[number].T, activation="silu")
        return np.asarray(active @ down[number].T)

    expected = experts_reference.experts(x[0], logits[0], routing, expert=expert)[None]
    return face.run(threads=threads)[0], expected


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
    seed=seeds,
    tokens=st.integers(1, 9),
    num_heads=st.integers(1, 5),
    sizes=st.sampled_from([(2, 2), (6, 6), (16, 8), (20, 6), (24, 24), (64, 32)]),
    interleaved=st.booleans(),
    position=st.integers(0, 40),
)
def test_rope(
    seed: int,
    tokens: int,
    num_heads: int,
    sizes: tuple[int, int],
    interleaved: bool,
    position: int,
) -> None:
    """Of whole heads, and of their first elements."""
    head_size, turned = sizes
    x = normal(seed, tokens, num_heads, head_size)
    cos, sin = tables(turned, position + tokens)
    face = Face()
    y = rope_onnx.rope(
        face.graph,
        face.input("x", x.reshape(1, tokens, -1)),
        face.input("positions", np.arange(position, position + tokens)[None]),
        face.input("cos", cos),
        face.input("sin", sin),
        num_heads=num_heads,
        turned_elements=turned,
        interleaved=interleaved,
    )
    face.output(y, (1, tokens, num_heads * head_size))
    expected = rope_reference.rope(x, cos[position:], sin[position:], interleaved=interleaved)
    assert_same(face.run()[0], expected.reshape(1, tokens, -1))


def tables(head_size: int, length: int) -> tuple[Array, Array]:
    frequencies = 100.0 ** -(np.arange(0, head_size, 2) / max(head_size, 1))
    return rope_reference.rope_tables(frequencies.astype(np.float32), length=length)


@settings(FEW, max_examples=300)
@given(
    seed=seeds,
    position=st.integers(0, 20),
    tokens=st.integers(1, 20),
    room=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 2), (5, 1), (6, 1)]),
    sizes=st.sampled_from(
        [(2, 2), (16, 16), (16, 0), (20, 20), (20, 8), (24, 24), (64, 64), (64, 32), (64, 24)]
    ),
    interleaved=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5, 16]),
    scaling=st.sampled_from([(None, None), (0.4, None), (None, 0.7), (2.0, 5.0)]),
    normed=st.booleans(),
    has_sinks=st.booleans(),
)
def test_attention(
    seed: int,
    position: int,
    tokens: int,
    room: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    interleaved: bool,
    window: int | None,
    scaling: tuple[float | None, float | None],
    normed: bool,
    has_sinks: bool,
) -> None:
    """A whole prompt (position 0), a later chunk of it, and decoding (one token)."""
    num_heads, num_kv_heads = heads
    head_size, turned = sizes
    scale, soft_cap = scaling
    context, end = position + tokens + room, position + tokens
    qkv = normal(seed, 1, tokens, (num_heads + 2 * num_kv_heads) * head_size)
    past = normal(seed + 1, 2, position, num_kv_heads, head_size)
    norms = normal(seed + 2, 2, head_size) if normed else None
    sinks = 2 * normal(seed + 3, num_heads) if has_sinks else None
    cos, sin = tables(turned, context)

    padded = cache_head_size(head_size)
    caches = np.full((2, 1, num_kv_heads, context, padded), 7.0, np.float32)
    caches[:, 0, :, :position] = 0.0
    caches[:, 0, :, :position, :head_size] = past.transpose(0, 2, 1, 3)
    face = Face()
    names = attention_onnx.AttentionNames(
        cos=face.input("cos", cos) if turned else "",
        sin=face.input("sin", sin) if turned else "",
        positions=""
        if not turned or attention_onnx.rotates_itself(head_size, turned)
        else face.input("positions", np.arange(position, end)[None]),
        lengths=face.input("lengths", np.asarray([end - 1], np.int32)),
        total=face.input("total", np.asarray(end, np.int32)),
    )
    query_norm, key_norm = (
        (None, None)
        if norms is None
        else (face.graph.weight("query_norm", norms[0]), face.graph.weight("key_norm", norms[1]))
    )
    results = attention_onnx.attention(
        face.graph,
        face.input("qkv", qkv),
        attention_onnx.CacheNames(
            keys=face.input("past_key", caches[0]), values=face.input("past_value", caches[1])
        ),
        names,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        turned_elements=turned,
        interleaved=interleaved,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=None if sinks is None else face.graph.weight("sinks", sinks),
        epsilon=EPSILON,
    )
    face.output(results[0], (1, tokens, num_heads * head_size))
    face.output(results[1], caches[0].shape)
    face.output(results[2], caches[1].shape)
    output, present_key, present_value = face.run()

    kv = num_kv_heads * head_size
    cuts = np.split(qkv[0], [num_heads * head_size, num_heads * head_size + kv], axis=-1)
    query, key, value = (part.reshape(tokens, -1, head_size) for part in cuts)
    if norms is not None:
        query = rms_norm_reference.rms_norm(query, norms[0], epsilon=EPSILON)
        key = rms_norm_reference.rms_norm(key, norms[1], epsilon=EPSILON)
    angles = cos[position:end], sin[position:end]
    query = rope_reference.rope(query, *angles, interleaved=interleaved)
    key = rope_reference.rope(key, *angles, interleaved=interleaved)
    keys, values = np.concatenate([past[0], key]), np.concatenate([past[1], value])
    expected = attention_reference.attention(
        query, keys, values, position=position, scale=scale, window=window, soft_cap=soft_cap,
        sinks=sinks,
    )  # fmt: skip
    assert_same(output, expected.reshape(1, tokens, -1), tolerance=5e-6)
    for present, wanted in ((present_key, keys), (present_value, values)):
        assert_same(present[0, :, :end, :head_size].transpose(1, 0, 2), wanted)


@FEW
@given(
    seed=seeds,
    rows=sizes,
    columns=sizes,
    gain=st.sampled_from([0.0, 1.0, 100.0]),
    activation=st.sampled_from(activation_reference.ACTIVATIONS),
)
def test_activated(seed: int, rows: int, columns: int, gain: float, activation: Any) -> None:
    x = gain * normal(seed, 1, rows, columns)
    face = Face()
    y = activation_onnx.activated(face.graph, face.input("x", x), activation=activation)
    face.output(y, x.shape)
    expected = activation_reference.activated(x, activation=activation)
    assert_same(face.run()[0], expected, tolerance=1e-5)


@FEW
@given(
    seed=seeds,
    rows=sizes,
    columns=sizes,
    gain=st.sampled_from([0.0, 1.0, 100.0]),
    activation=st.sampled_from([*activation_reference.ACTIVATIONS, "clamped"]),
)
def test_gated(seed: int, rows: int, columns: int, gain: float, activation: Any) -> None:
    """Also where e^−x overflows float32."""
    clamp = None
    if activation == "clamped":
        activation, clamp = "silu", gated_mlp_reference.Clamp(limit=0.8, slope=1.7)
    x = gain * normal(seed, 1, rows, 2 * columns)
    face = Face()
    y = gated_mlp_onnx.gated(face.graph, face.input("x", x), activation=activation, clamp=clamp)
    face.output(y, (1, rows, columns))
    expected = gated_mlp_reference.gated(x, activation=activation, clamp=clamp)
    assert_same(face.run()[0], expected, tolerance=1e-5)


@FEW
@given(
    seed=seeds,
    rows=sizes,
    columns=sizes,
    scale=st.sampled_from([1.0, 0.125, 7.0]),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
)
def test_finish_logits(
    seed: int, rows: int, columns: int, scale: float, soft_cap: float | None
) -> None:
    x = 20 * normal(seed, 1, rows, columns)
    face = Face()
    given = face.input("x", x)
    y = logits_onnx.finish_logits(face.graph, given, scale=scale, soft_cap=soft_cap)
    face.output(face.graph.node("Identity", y) if y == given else y, x.shape)
    assert_same(face.run()[0], logits_reference.finish_logits(x, scale=scale, soft_cap=soft_cap))


@FEW
@given(seed=seeds, tokens=st.integers(1, 9), rows=sizes, columns=sizes)
def test_matmul(seed: int, tokens: int, rows: int, columns: int) -> None:
    x, weight = normal(seed, 1, tokens, columns), normal(seed + 1, rows, columns)
    face = Face()
    y = matmul_onnx.matmul(face.graph, face.input("x", x), face.graph.weight("w", weight))
    face.output(y, (1, tokens, rows))
    assert_same(face.run()[0], matmul_reference.matmul(x, weight), tolerance=1e-5)


nbits_forms = st.sampled_from(
    [
        (bits, size)
        for bits in matmul_nbits_reference.SUPPORTED_BITS
        for size in (16, 32, 64, 128)
        if size >= matmul_nbits_reference.LEAST_BLOCK[bits]
    ]
)
"""Bits and block size."""


@settings(FEW, max_examples=200)
@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    rows=sizes,
    columns=st.integers(1, 300),
    form=nbits_forms,
    accuracy=st.sampled_from(["fast", "high"]),
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
    float32. With "high" it does not round them.
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


@settings(FEW, max_examples=100)
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
    face = Face()
    rows, columns = matrix.shape
    zeros = None
    if matrix.zero_points is not None:
        packed = matmul_nbits_reference.pack_zero_points(matrix.zero_points, matrix.bits)
        zeros = face.graph.weight("zero_points", packed)
    y = matmul_nbits_onnx.matmul_nbits(
        face.graph,
        face.input("x", x),
        face.graph.weight("codes", matrix.codes),
        face.graph.weight("scales", matrix.scales),
        zeros,
        None if matrix.offsets is None else face.graph.weight("offsets", matrix.offsets),
        rows=rows,
        columns=columns,
        bits=matrix.bits,
        block_size=matrix.block_size,
        accuracy=accuracy,
    )
    face.output(y, (*x.shape[:-1], rows))
    return face.run()[0]


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
