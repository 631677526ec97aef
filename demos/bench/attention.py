"""Attention of new tokens: by the operator of kernels/native, and by ONNX Runtime's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import Speeds, compared
from edge.host import block_kernels
from edge.kernels.attention.onnx import AttentionNames, CacheNames, attention
from edge.kernels.attention.reference import PackedAttention
from edge.kernels.kv_cache.cache_size import (
    cache_row,
    keeps_unrounded,
    kept_tokens,
    unrounded_shape,
)
from edge.kernels.onnx_graph import CPU, OnnxGraph

_HEADS = {
    "SmolLM2 135M": (9, 3, 64),
    "W": (32, 4, 64),
    "Llama 3 8B": (32, 8, 128),
    "Phi-3 mini": (32, 32, 96),
    "Gemma 3 1B": (4, 1, 256, 512),
    "gpt-oss 20B": (64, 8, 64, 128),
}
"""Heads of queries and of keys, the elements of one, and the window of a layer that has one."""
_BITS = {"float32": None, "int8": 8, "int4": 4}
_LAYERS_BYTES = 96 << 20
"""Bytes of layers that take turns: more than the processor's caches have room for."""
_LEAST_S = 0.2

_OWN, _OTHER, _OWN_INT8 = "own", "ONNX Runtime's", "own, int8"


@case.case(
    "how long attention takes",
    case.number("--threads", 1),
    click.option(
        "--rows", multiple=True, type=click.IntRange(1), default=(1, 8, 256), show_default=True
    ),
    click.option(
        "--behind",
        multiple=True,
        type=click.IntRange(1),
        default=(400, 4000),
        show_default=True,
    ),
    case.rounds(7),
)
def own_attention(given: Given) -> Iterator[Found]:
    """One layer's attention of so many new tokens of a request, behind so many others."""
    if block_kernels.library() is None:
        raise click.UsageError("kernels/native is not installed")
    for model, heads in _HEADS.items():
        for kind, bits in _BITS.items():
            if bits == 4 and len(heads) > 3:  # windows keep no rows beside tokens kept unrounded
                continue
            # ONNX Runtime's operator keeps no tokens unrounded beside codes.
            other = (_OTHER, bits, False) if bits != 4 else (_OWN_INT8, 8, True)
            sides: dict[str, list[tuple[str, Callable[[], float]]]] = {
                name: [
                    (
                        f"{rows} behind {tokens}",
                        _layers(heads, side_bits, rows, tokens, given.threads, is_own=is_own),
                    )
                    for rows in given.rows
                    for tokens in given.behind
                ]
                for name, side_bits, is_own in ((_OWN, bits, True), other)
            }
            figures = Figures()

            def speeds(side: str, of: dict[str, Any] = sides) -> Callable[[int], Speeds]:
                return lambda _number: {part: 1 / run() for part, run in of[side]}

            yield Found(
                figures=compared(
                    {name: speeds(name) for name in sides},
                    given.rounds, over=other[0], unit="layers/s", figures=figures,
                ),
                variant=f"KV {kind}, {given.threads} threads",
                model=f"heads of {model}",
            )  # fmt: skip


def _layers(
    heads: tuple[int, ...],
    bits: int | None,
    rows: int,
    tokens: int,
    threads: int,
    *,
    is_own: bool,
) -> Callable[[], float]:
    """A function that gives the seconds of a layer, the mean of several that take turns."""
    num_heads, num_kv_heads, size, *windows = heads
    window = windows[0] if windows else None
    form = PackedAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size, turned_elements=size,
        window=window,
    )  # fmt: skip
    graph, random = OnnxGraph("new_tokens", replace(CPU, has_own_attention=is_own)), _random()
    dtype, elements = cache_row(size, bits)
    context = tokens + rows
    kept = None if window is None else kept_tokens(window, elements, rows)
    shape = [1, num_kv_heads, kept or context, elements]
    angles = random((2, context, size // 2))
    feeds = {
        "qkv": random((1, rows, form.columns)), "cos": angles[0], "sin": angles[1],
        "lengths": np.asarray([context - 1], np.int32), "total": np.asarray(context, np.int32),
    }  # fmt: skip
    if is_own:
        feeds["counts"] = np.asarray([rows], np.int32)
    if bits:
        feeds |= {f"{n}_scales": 0.02 + 0 * random((1, num_kv_heads, 1, size)) for n in "kv"}
    inputs = {
        name: graph.input(name, each.dtype.type, [*each.shape]) for name, each in feeds.items()
    }
    past = [graph.input(f"past_{name}", dtype, [*shape]) for name in "kv"]
    beside = [1, *unrounded_shape(num_kv_heads, size)] if keeps_unrounded(bits) else []
    unrounded = graph.input("past_unrounded", np.float32, [*beside]) if beside else ""
    found = attention(
        graph, inputs["qkv"],
        CacheNames(
            keys=past[0], values=past[1], bits=bits,
            key_scales=inputs.get("k_scales", ""), value_scales=inputs.get("v_scales", ""),
            is_windowed=window is not None, unrounded=unrounded,
        ),
        AttentionNames(
            cos=inputs["cos"], sin=inputs["sin"], positions="", lengths=inputs["lengths"],
            total=inputs["total"], counts=inputs.get("counts", ""),
        ),
        form,
    )  # fmt: skip
    graph.output(found[0], "output", np.float32, [1, rows, num_heads * size])
    for value, name in zip(found[1:], "kv", strict=False):
        graph.output(value, f"present_{name}", dtype, [*shape])
    if beside:
        graph.output(found[3], "present_unrounded", np.float32, [*beside])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(block_kernels.library()))
    session = ort.InferenceSession(graph.build(), options, providers=["CPUExecutionProvider"])
    layers = max(2, _LAYERS_BYTES // (2 * int(np.prod(shape)) * np.dtype(dtype).itemsize))

    def bind(binding: Any, name: str, values: NDArray[Any]) -> None:
        held = ort.OrtValue.ortvalue_from_numpy(values)
        binding.bind_ortvalue_input(f"past_{name}", held)
        binding.bind_ortvalue_output(f"present_{name}", held)

    bound = []
    for _layer in range(layers):
        binding = session.io_binding()
        for name, each in feeds.items():
            binding.bind_cpu_input(name, each)
        for name in "kv":
            values = (40 * random(tuple(shape))).astype(dtype)
            bind(binding, name, values)
        if beside:
            bind(binding, "unrounded", random(tuple(beside)))
        binding.bind_output("output")
        bound.append(binding)

    turns = itertools.cycle(bound)

    def seconds() -> float:
        begun_s, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() < begun_s + _LEAST_S:
            session.run_with_iobinding(next(turns))
            runs += 1
        return (time.perf_counter() - begun_s) / runs

    return seconds


def _random() -> Callable[[tuple[int, ...]], Any]:
    made = np.random.default_rng(0)
    return lambda shape: made.standard_normal(shape, np.float32)
