"""The product with a matrix of each kind, as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.kernels.matmul.onnx import matmul
from edge.kernels.matmul_nbits.onnx import matmul_nbits
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.onnx_graph import OnnxGraph
from edge.weights.block_matrices import SORTED, Blocks, OffsetBlocks, ZeroBlocks
from edge.weights.float_matrices import Floats
from edge.weights.matrix_kind import MatrixKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix [rows, columns] of a graph."""

    kind: MatrixKind[Any]
    accuracy: Accuracy
    rows: int
    columns: int
    array: Callable[[str], str]
    """The graph's value for one of the arrays it is stored as, by the array's name."""


def product(graph: OnnxGraph, x: str, matrix: Matrix) -> str:
    """x [..., columns] → [..., rows]."""
    return _PRODUCTS[type(matrix.kind)](graph, x, matrix)


def pad(graph: OnnxGraph, x: str, padding: int) -> str:
    """Zeros before the columns of x, where a slice of a matrix starts inside a block of it."""
    if not padding:
        return x
    pads = graph.constant(f"pad_{padding}", np.asarray([0, 0, padding, 0, 0, 0]))
    return graph.node("Pad", x, pads)


def _floats(graph: OnnxGraph, x: str, matrix: Matrix) -> str:
    return matmul(graph, x, matrix.array("weight"))


def _blocks(graph: OnnxGraph, x: str, matrix: Matrix) -> str:
    kind = matrix.kind
    assert isinstance(kind, Blocks)
    return matmul_nbits(
        graph,
        x,
        matrix.array("codes"),
        matrix.array("scales"),
        matrix.array("zero_points") if isinstance(kind, ZeroBlocks) else None,
        matrix.array("offsets") if isinstance(kind, OffsetBlocks) else None,
        rows=matrix.rows,
        columns=matrix.columns,
        bits=kind.bits,
        block_size=kind.block_size,
        accuracy=matrix.accuracy,
    )


def _sorted_blocks(graph: OnnxGraph, x: str, matrix: Matrix) -> str:
    return _blocks(graph, graph.node("Gather", x, matrix.array("order"), axis=-1), matrix)


_PRODUCTS: dict[type[MatrixKind[Any]], Callable[[OnnxGraph, str, Matrix], str]] = {
    Floats: _floats,
    Blocks: _blocks,
    ZeroBlocks: _blocks,
    OffsetBlocks: _blocks,
    **dict.fromkeys(SORTED.values(), _sorted_blocks),
}
