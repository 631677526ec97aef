"""One operator as the product runs it: emitted into an OnnxGraph, through a real session."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.kernels.onnx_graph import OnnxGraph

Array = NDArray[Any]


class Face:
    """A graph under construction, the values of its inputs, and the names of its outputs."""

    def __init__(self) -> None:
        self.graph = OnnxGraph("face")
        self._feeds: dict[str, Array] = {}
        self._outputs: list[str] = []

    def input(self, name: str, value: Array) -> str:
        self._feeds[name] = value
        return self.graph.input(name, value.dtype, value.shape)

    def output(self, value: str, shape: tuple[int, ...]) -> None:
        name = f"result_{len(self._outputs)}"
        self.graph.output(value, name, np.float32, shape)
        self._outputs.append(name)

    def run(self, *, threads: int = 1) -> list[Array]:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = ort.InferenceSession(
            self.graph.build(), options, providers=["CPUExecutionProvider"]
        )
        results: list[Array] = session.run(self._outputs, self._feeds)
        return results


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same(actual: Array, expected: Array, *, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the largest value, and finite."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.isfinite(actual).all()
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)
