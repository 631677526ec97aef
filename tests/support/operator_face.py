"""One operator as the product runs it: emitted into an OnnxGraph, through a real session."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from hypothesis import settings
from numpy.typing import NDArray

from edge.host import block_kernels
from edge.kernels.cases import Case
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import CPU, WEBGPU, OnnxGraph

Array = NDArray[Any]

PROVIDER = WEBGPU if os.environ.get("EDGE_TESTED_PROVIDER") == "webgpu" else CPU
"""The provider whose faces this process tests."""

FEW = settings(max_examples=50 if PROVIDER == CPU else 3, deadline=None)


def open_session(graph: OnnxGraph, *, threads: int = 1) -> ort.InferenceSession:
    if PROVIDER == WEBGPU:
        from edge.backends.webgpu.device import Device

        return Device(threads).session(graph.build())
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if (library := block_kernels.library()) is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(graph.build(), options, providers=["CPUExecutionProvider"])


def computed(face: Callable[..., Any], case: Case, *, threads: int = 1) -> list[Array]:
    """What a face makes of a case."""
    graph = CaseGraph(provider=PROVIDER)
    graph.add("", face, case)
    return run_cases(graph, threads=threads)


def run_cases(graph: CaseGraph, *, threads: int = 1) -> list[Array]:
    session = open_session(graph.graph, threads=threads)
    results: list[Array] = session.run(list(graph.expected[0]), graph.feeds[0])
    return results


def assert_computed(face: Callable[..., Any], case: Case, *, tolerance: float = 2e-6) -> None:
    """It is what the formula gives."""
    for found, expected in zip(computed(face, case), case.expected(), strict=True):
        assert_same(found, expected, tolerance=tolerance)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same(actual: Array, expected: Array, *, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the largest value, and finite."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.isfinite(actual).all()
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)
