"""What ONNX Runtime computes on this device for the operators of a proof."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.attention_inputs import attention_face
from edge.backends.onnx.products import Matrix, as_taken, product
from edge.backends.onnx.runtime import ort
from edge.kernels.cases import Array
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.onnx_cases import CaseGraph
from edge.kernels.onnx_graph import CPU, OnnxGraph, Provider
from edge.kernels.rms_norm.onnx import add_rms_norm
from edge.weights.formats import WeightFormat
from edge.weights.proof_cases import ATTENTION, CONTEXT, EPSILON, ROWS, ProofCase, proof_cases


def proof(
    weight_format: WeightFormat,
    seed: int,
    open_session: Callable[[bytes], ort.InferenceSession],
    *,
    provider: Provider = CPU,
) -> list[Array]:
    """The numbers of each operator of `proof_cases`, in each of its steps."""
    graph = CaseGraph(len(ROWS), provider)
    names = []
    for number, each in enumerate(proof_cases(weight_format, seed)):
        face = _face(graph, each, weight_format, number)
        names += graph.add(each.operator, face, *each.cases, results=1)
    session = open_session(graph.graph.build())
    of_runs = [session.run(names, feeds) for feeds in graph.feeds]
    return [np.asarray(run[place]) for place in range(len(names)) for run in of_runs]


def _face(
    graph: CaseGraph, case: ProofCase, weight_format: WeightFormat, number: int
) -> Callable[..., Any]:
    if case.face == "rms_norm":
        return add_rms_norm
    if case.face == "gated_mlp":
        return gated
    if case.face == "attention":
        attended = attention_face(graph, ATTENTION, EPSILON, ROWS, CONTEXT, label="proof")
        return lambda graph, x: attended(graph, x, None, None, None)
    return partial(_product, case=case, weight_format=weight_format, number=number)


def _product(
    graph: OnnxGraph, x: str, *, case: ProofCase, weight_format: WeightFormat, number: int
) -> str:
    kind, stored = case.kind, case.stored
    assert kind is not None
    assert stored is not None
    rows, columns = case.cases[0].expected()[0].shape[-1], case.cases[0].inputs[0].shape[-1]

    def array(suffix: str) -> str:
        value: NDArray[Any] = stored[suffix]
        return graph.weight(f"proof.{number}.{suffix}", as_taken(suffix, value, graph.provider))

    matrix = Matrix(
        kind=kind, accuracy=weight_format.accuracy, rows=rows, columns=columns, array=array
    )
    return product(graph, x, matrix)
