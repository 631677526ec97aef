"""Weights as float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.models.parts import MatrixSlice, VectorSlice
from edge.models.spec import ModelSpec
from edge.offload import WeightStore
from edge.progress import OnProgress
from edge.weights.encoding import Encoding
from edge.weights.matrix_kind import CheckpointTensors, MatrixKind, StoredArray
from edge.weights.recipe import Recipe
from edge.weights.weight_limits import check_weights, largest_of


@dataclass(frozen=True, slots=True)
class Floats(MatrixKind[NDArray[np.float32]]):
    """Matrices of float32 [rows, columns]."""

    operator = "matmul"
    can_round_inputs = False
    words = "float32"
    bits = None
    column_multiple = 1
    packed_bytes_per_weight = 4.0

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        return (StoredArray(suffix="weight", dtype="float32", shape=(rows, columns)),)

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return stored("weight")

    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return stored("weight")

    def rounded(self, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        return {"weight": np.ascontiguousarray(values)}

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        return {"weight": normal / columns**0.5}


class FloatSource:
    """float32 weights, widened from any float type of the checkpoint.

    Reading raises CheckpointError for invalid weights.
    """

    def __init__(
        self, store: WeightStore, tensor_name: Callable[[str], str], norm_offset: float = 0.0
    ) -> None:
        """norm_offset: added to the weights of norms."""
        self._store = store
        self._tensor_name = tensor_name
        self._norm_offset = np.float32(norm_offset)

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        pieces = [self._read(role, rows=rows, columns=part.columns) for role, rows in part.parts]
        return {"weight": pieces[0] if len(pieces) == 1 else np.concatenate(pieces)}

    def unrounded(self, part: MatrixSlice) -> NDArray[np.float32] | None:
        return None

    def vector(self, part: VectorSlice) -> NDArray[np.float32]:
        pieces = [self._read(role, rows=rows) for role, rows in part.parts]
        found = np.concatenate([piece.reshape(-1) for piece in pieces])
        return found + self._norm_offset if part.name.endswith("norm") else found

    def table(self, role: str, rows: range, columns: range | None = None) -> NDArray[Any]:
        name = self._tensor_name(role)
        values = self._store.read(name, rows=rows, columns=columns)
        check_weights(self._store, name, largest_of(values))
        return values

    def close(self) -> None:
        """Does nothing, because the caller owns the store."""

    def _read(self, role: str, *, rows: range, columns: range | None = None) -> NDArray[np.float32]:
        name = self._tensor_name(role)
        values = self._store.read(name, rows=rows, columns=columns).astype(np.float32, copy=False)
        check_weights(self._store, name, largest_of(values))
        return values


def float32(spec: ModelSpec, block_size: int | None) -> Encoding:
    """The encoding of float32, which has no blocks."""

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> FloatSource:
        return FloatSource(tensors.store, tensors.tensor_name, tensors.norm_offset)

    return Encoding(recipe=Recipe(Floats()), open=open_source)
