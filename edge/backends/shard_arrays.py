"""A shard's file as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from offload import TensorEntry, numpy_dtype


class ShardArrays:
    """The tensors of a shard's file as numpy arrays, read when they are asked for."""

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
        """The whole tensor, or some of its rows."""
        entry = self._entries[name]
        dtype = numpy_dtype(entry.dtype)
        if rows is None:
            count = math.prod(entry.shape)
            flat = np.fromfile(self.path, dtype, count, offset=entry.offset)
            return flat.reshape(entry.shape)
        row = math.prod(entry.shape[1:])
        found = [
            np.fromfile(self.path, dtype, row, offset=entry.offset + r * row * dtype.itemsize)
            for r in rows
        ]
        return np.stack(found).reshape(len(rows), *entry.shape[1:])

    def entry(self, name: str) -> TensorEntry:
        """Where it lies in the file."""
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """None where the shard has no such vector."""
        return self.read(name) if name in self else None

    def padding(self, name: str) -> int:
        """Zeros before a product's inputs: its slice begins inside a block of shared scales."""
        return self.format.kind.padding(self.layout.matrix(name).columns.start)

    def columns(self, name: str) -> int:
        """Columns of a matrix as it is stored, with padding."""
        return len(self.layout.matrix(name).columns) + self.padding(name)

    def matrix(self, name: str) -> Any:
        """What kernels of the format's kind are given."""
        return self.format.kind.matrix(
            lambda suffix: self.read(f"{name}.{suffix}"), self.columns(name)
        )

    def floats(self, name: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """What some rows of a matrix stand for [rows, columns], in any format."""
        stored = self.format.kind.floats(
            lambda suffix: self.read(f"{name}.{suffix}", rows), self.columns(name)
        )
        return stored[:, self.padding(name) :]
