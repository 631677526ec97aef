"""The product with a matrix of each kind, as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from edge.weights.block_matrices import Blocks
from edge.weights.float_matrices import Floats
from edge.weights.formats import WeightFormat
from edge.weights.matrix_kind import MatrixKind
from kernels.matmul.onnx import matmul
from kernels.matmul_nbits.onnx import matmul_nbits
from kernels.matmul_nbits.reference import Accuracy
from kernels.onnx_graph import OnnxGraph


class _Product(Protocol):
    def __call__(
        self,
        graph: OnnxGraph,
        x: str,
        weight: Callable[[str], str],
        bias: str | None,
        kind: Any,
        *,
        rows: int,
        columns: int,
        accuracy: Accuracy,
    ) -> str: ...


def product(
    graph: OnnxGraph,
    x: str,
    weight: Callable[[str], str],
    bias: str | None,
    weight_format: WeightFormat,
    *,
    rows: int,
    columns: int,
) -> str:
    """x [..., columns] times a matrix [rows, columns], and its bias; `weight` names its arrays."""
    kind = weight_format.kind
    return _PRODUCTS[type(kind)](
        graph, x, weight, bias, kind, rows=rows, columns=columns, accuracy=weight_format.accuracy
    )


def pad(graph: OnnxGraph, x: str, padding: int) -> str:
    """Zeros before the columns of x, where a slice of a matrix starts inside a block of it."""
    if not padding:
        return x
    pads = graph.constant(f"pad_{padding}", np.asarray([0, 0, padding, 0, 0, 0]))
    return graph.node("Pad", x, pads)


def _floats(
    graph: OnnxGraph,
    x: str,
    weight: Callable[[str], str],
    bias: str | None,
    kind: Floats,
    *,
    rows: int,
    columns: int,
    accuracy: Accuracy,
) -> str:
    return matmul(graph, x, weight("weight"), bias)


def _blocks(
    graph: OnnxGraph,
    x: str,
    weight: Callable[[str], str],
    bias: str | None,
    kind: Blocks,
    *,
    rows: int,
    columns: int,
    accuracy: Accuracy,
) -> str:
    return matmul_nbits(
        graph,
        x,
        weight("codes"),
        weight("scales"),
        bias,
        rows=rows,
        columns=columns,
        bits=kind.bits,
        block_size=kind.block_size,
        accuracy=accuracy,
    )


_PRODUCTS: dict[type[MatrixKind[Any]], _Product] = {Floats: _floats, Blocks: _blocks}
