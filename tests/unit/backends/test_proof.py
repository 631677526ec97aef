"""Devices prove their arithmetic: right kernels pass in every format, a wrong one is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edge.backends.onnx import products
from edge.backends.onnx import proof as ort_proof
from edge.backends.onnx.attention_inputs import attention_face
from edge.kernels.onnx_graph import OnnxGraph
from edge.planning.proving import fault_of
from edge.weights.formats import WeightFormat
from edge.weights.proof_cases import distance, proof_cases
from tests.support.formats import uniform_format

FORMATS = [
    *(("float32", 32, "high"), ("int8", 32, "fast"), ("int8", 32, "high")),
    *(("int4", 16, "fast"), ("int4", 32, "fast"), ("int4", 128, "high")),
    *(("int2", 64, "fast"), ("int2", 32, "high")),
]


def opened(model: bytes) -> ort.InferenceSession:
    chosen = ort.SessionOptions()
    chosen.intra_op_num_threads = 1
    return ort.InferenceSession(model, chosen, providers=["CPUExecutionProvider"])


def proved(weight_format: WeightFormat) -> bytes:
    return b"".join(each.tobytes() for each in ort_proof.proof(weight_format, 1, opened))


@pytest.mark.parametrize("name", FORMATS, ids=lambda each: "-".join(map(str, each)))
def test_right_kernels_are_right_in_every_format(name: tuple[str, int, Any]) -> None:
    weight_format = uniform_format(*name)
    assert fault_of(proved(weight_format), weight_format) is None
    cases = proof_cases(weight_format, 7)  # and for other inputs
    found = iter(ort_proof.proof(weight_format, 7, opened))
    for case in cases:
        for expected in case.expected():
            assert distance(next(found), expected) <= case.allowed / 2, case.operator
    assert next(found, None) is None


def more(face: Any) -> Any:
    """A face whose first result is a tenth too large."""

    def wrong(graph: OnnxGraph, *arguments: Any, **named: Any) -> Any:
        found = face(graph, *arguments, **named)
        tenth = graph.constant("a_tenth_more", np.asarray(1.1, np.float32))
        if isinstance(found, tuple):
            return graph.node("Mul", found[0], tenth), *found[1:]
        return graph.node("Mul", found, tenth)

    return wrong


@pytest.mark.parametrize(
    ("owner", "face", "operator"),
    [
        (
            products,
            "matmul_nbits",
            "matmul_nbits in 4 bits in blocks of 32 (int4-pure), 1 row, errs by",
        ),
        (ort_proof, "add_rms_norm", "rms_norm (int4-pure), 1 row, errs by"),
        (ort_proof, "gated", "gated_mlp (int4-pure), 1 row, errs by"),
    ],
)
def test_a_wrong_operator_is_named_with_its_format_and_distance(
    monkeypatch: pytest.MonkeyPatch, owner: Any, face: str, operator: str
) -> None:
    monkeypatch.setattr(owner, face, more(getattr(owner, face)))
    weight_format = uniform_format("int4", 32, "fast")
    fault = fault_of(proved(weight_format), weight_format)
    assert fault is not None
    assert fault.startswith(operator)
    assert fault.endswith("is allowed")


def test_attention_that_is_wrong_in_a_chunk_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:

    def backwards(*arguments: Any, **named: Any) -> Any:
        face = attention_face(*arguments, **named)
        return lambda graph, x, *rest: face(graph, graph.node("Neg", x), *rest)

    monkeypatch.setattr(ort_proof, "attention_face", backwards)
    weight_format = uniform_format("float32", 32, "high")
    fault = fault_of(proved(weight_format), weight_format)
    assert fault is not None
    assert fault.startswith("rope and attention (float32), ")


def test_numbers_that_are_missing_or_not_finite_are_wrong() -> None:
    weight_format = uniform_format("int4", 32, "fast")
    right = proved(weight_format)
    nan = np.full(1, np.nan, np.float32).tobytes()
    for numbers in (right[:-4], right[:-1], right + bytes(4), nan + right[4:], right[:-4] + nan):
        assert fault_of(numbers, weight_format) is not None
    assert fault_of(b"", weight_format) is not None
    assert distance(np.full(1, np.nan, np.float32), np.ones(1, np.float32)) == float("inf")
