"""The time of a token's products, by which a device of a host is chosen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from edge.backends.onnx.runtime import ort
from edge.kernels.matmul_nbits.onnx import matmul_nbits
from edge.kernels.onnx_graph import OnnxGraph, Provider

_SIZE = 4096
"""Rows and columns of a matrix."""
_MATRICES = 8
"""64 MiB together: more than most processors' caches, little for a start."""
_BLOCK = 32
_RUNS = 5


def decode_seconds(
    open_session: Callable[[bytes], ort.InferenceSession],
    *,
    provider: Provider,
    size: int = _SIZE,
) -> float:
    """Median seconds of one row through a few int4 matrices, its copies included."""
    graph, draw = OnnxGraph("speed", provider), np.random.default_rng(0)
    x = graph.input("x", np.float32, [1, 1, size])
    codes = draw.integers(0, 256, (size, size // _BLOCK, _BLOCK // 2), np.uint8)
    scales = np.full((size, size // _BLOCK), size**-0.5 / 8, np.float32)
    value = x
    for number in range(_MATRICES):
        value = matmul_nbits(
            graph,
            value,
            graph.weight(f"codes_{number}", codes),
            graph.weight(f"scales_{number}", scales),
            rows=size,
            columns=size,
            bits=4,
            block_size=_BLOCK,
        )
    graph.output(value, "y", np.float32, [1, 1, size])
    session = open_session(graph.build())
    row = {"x": draw.standard_normal((1, 1, size)).astype(np.float32)}
    session.run(None, row)  # the first run compiles
    found = []
    for _ in range(_RUNS):
        start_s = time.perf_counter()
        session.run(None, row)
        found.append(time.perf_counter() - start_s)
    return statistics.median(found)
