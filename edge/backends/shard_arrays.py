"""A shard's file as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.errors import CheckpointError
from edge.offload import TensorEntry, numpy_dtype
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from edge.weights.recipe import StoredMatrix


class ShardArrays:
    """The tensors of a shard's file as numpy arrays, read on demand."""

    def __init__(
        self, layout: ShardLayout, weights: ShardWeights, weight_format: WeightFormat
    ) -> None:
        self.layout = layout
        self.format = weight_format
        self.path = weights.path
        self._entries = {entry.name: entry for entry in weights.manifest.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, rows: Sequence[int] | None = None) -> NDArray[Any]:
        """The tensor, or some of its rows. Raises CheckpointError if the file is truncated."""
        entry = self._entries[name]
        dtype = numpy_dtype(entry.dtype)
        if rows is None:
            return self._read(name, dtype, math.prod(entry.shape), entry.offset).reshape(
                entry.shape
            )
        row = math.prod(entry.shape[1:])
        found = [
            self._read(name, dtype, row, entry.offset + r * row * dtype.itemsize) for r in rows
        ]
        return np.stack(found).reshape(len(rows), *entry.shape[1:])

    def _read(self, name: str, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        found = np.fromfile(self.path, dtype, count, offset=offset)
        if found.size != count:
            raise CheckpointError(
                f"{self.path} ends within {name}: the file was changed",
                remedy="load the model again",
            )
        return found

    def entry(self, name: str) -> TensorEntry:
        """The place of a tensor in the file."""
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """A vector; None if the shard lacks it."""
        return self.read(name) if name in self else None

    def stored(self, name: str) -> tuple[StoredMatrix, ...]:
        """The stored parts of a matrix, one for each kind."""
        return self.format.recipe.stored(self.layout.matrix(name))

    def matrix(self, stored: StoredMatrix) -> Any:
        """A stored matrix in the form for kernels of its kind."""
        return stored.kind.matrix(
            lambda suffix: self.read(f"{stored.name}.{suffix}"), stored.columns
        )

    def floats(self, stored: StoredMatrix, rows: Sequence[int]) -> NDArray[np.float32]:
        """Some rows of a stored matrix, dequantized [rows, columns]."""
        arrays = self.some_rows(stored, rows)
        values = stored.kind.floats(arrays.__getitem__, stored.columns)
        return values[: len(rows), stored.padding :]

    def some_rows(self, stored: StoredMatrix, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The arrays of a matrix of these rows of a stored one, by suffix."""
        return stored.kind.some_rows(
            lambda suffix, places: self.read(f"{stored.name}.{suffix}", places), rows
        )
