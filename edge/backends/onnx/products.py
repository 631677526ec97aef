"""The product with a matrix of each kind, as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul.onnx import matmul, matmul_weight
from edge.kernels.matmul_blocks.onnx import block_product, chosen_block_products
from edge.kernels.matmul_nbits.onnx import matmul_nbits
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.onnx_graph import OnnxGraph, Provider
from edge.weights.block_matrices import Blocks
from edge.weights.file_blocks import FileBlocks
from edge.weights.matrix_kind import MatrixKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix [rows, columns] of a graph."""

    kind: MatrixKind[Any]
    accuracy: Accuracy
    rows: int
    columns: int
    array: Callable[[str], str]
    """Gives the graph's value for one of the matrix's stored arrays, by name."""
    is_loose: bool = False
    """Whether its values are exchanged under the session."""


def product(graph: OnnxGraph, x: str, matrix: Matrix) -> str:
    """x [..., columns] → [..., rows]."""
    kind = matrix.kind
    if isinstance(kind, FileBlocks):
        return block_product(
            graph,
            x,
            matrix.array("blocks"),
            kind.form,
            rows=matrix.rows,
            columns=matrix.columns,
            accuracy=matrix.accuracy,
            holds=not matrix.is_loose,
        )
    if not isinstance(kind, Blocks):
        return matmul(graph, x, matrix.array("weight"))
    if kind.is_sorted:
        x = graph.node("Gather", x, matrix.array("order"), axis=-1)
    return matmul_nbits(
        graph,
        x,
        matrix.array("codes"),
        matrix.array("scales"),
        matrix.array("zero_points") if kind.zero_points else None,
        matrix.array("offsets") if kind.offsets else None,
        rows=matrix.rows,
        columns=matrix.columns,
        bits=kind.bits,
        block_size=kind.block_size,
        accuracy=matrix.accuracy,
    )


def chosen_products(graph: OnnxGraph, x: str, chosen: str, matrices: Sequence[Matrix]) -> str:
    """x [..., columns] of some rows, chosen [uses] → [1, uses, rows]: of each use with the matrix
    of its number. They are alike, and in blocks of files."""
    first = matrices[0]
    assert isinstance(first.kind, FileBlocks)
    blocks = [each.array("blocks") for each in matrices]
    return chosen_block_products(
        graph, x, chosen, blocks, first.kind.form, rows=first.rows, columns=first.columns,
        accuracy=first.accuracy,
    )  # fmt: skip


def as_taken(suffix: str, array: NDArray[Any], provider: Provider) -> NDArray[Any]:
    """One of a matrix's stored arrays as the provider's products take it."""
    return matmul_weight(array, provider) if suffix in FLOAT_MATRICES else array


FLOAT_MATRICES = ("weight", "offsets")
"""The stored arrays that products take as `matmul_weight` has them."""


def pad(graph: OnnxGraph, x: str, padding: int) -> str:
    """x with `padding` zero columns before it, for slices that start inside a block."""
    if not padding:
        return x
    pads = graph.constant(f"pad_{padding}", np.asarray([0, 0, padding, 0, 0, 0]))
    return graph.node("Pad", x, pads)
