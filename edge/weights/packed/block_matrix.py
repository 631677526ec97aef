"""Matrices whose blocks have the form of those of GGUF files, with a type of their own there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_blocks.reference import BlockParts
from edge.models.parts import MatrixSlice
from edge.offload import StoreError
from edge.weights.block_rounding import largest_weight
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import FloatSource
from edge.weights.matrix_kind import CheckpointTensors
from edge.weights.packed.matrix import CodedMatrix
from edge.weights.weight_limits import check_weights

E2M1_ZERO = 128
E2M1_CODES = (
    E2M1_ZERO + np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
).astype(np.uint8)
"""Twice the values of floats of 4 bits, as codes of 8 bits."""
_PIECE_BYTES = 1 << 22


def halves_of(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of 4 bits [..., 2 n] of bytes [..., n], the low one first."""
    halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMatrix(CodedMatrix):
    """A matrix with blocks of type `own`, besides codes of 8 bits that packed kernels take."""

    own: FileBlocks

    @property
    def is_whole(self) -> bool:
        """Whether its blocks are whole ones of that type."""
        return self.shape[1] % self.own.form.block_size == 0

    def parts(self, rows: range, columns: range) -> Iterator[BlockParts]:
        """These rows of all blocks that have some of the columns, a piece of rows at a time.

        Raises StoreError, CheckpointError.
        """
        blocks = self.own.blocks_of(columns)
        step = max(1, _PIECE_BYTES // self.shape[1])
        for first in range(rows.start, rows.stop, step):
            few = range(first, min(first + step, rows.stop))
            yield self.some_parts(range(self.first + few.start, self.first + few.stop), blocks)

    @abstractmethod
    def some_parts(self, rows: range, blocks: range) -> BlockParts:
        """These blocks. rows: of the tensors."""


class BlockSource(FloatSource):
    """Reads these matrices, by role, as blocks in their own bits, and the rest as float32."""

    def __init__(self, tensors: CheckpointTensors, matrices: Mapping[str, BlockMatrix]) -> None:
        super().__init__(tensors.store, tensors.tensor_name, tensors.norm_offset)
        self._matrices = matrices

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        matrix = self._matrices.get(part.parts[0][0])
        if matrix is None:
            return super().matrix(part)
        size = matrix.own.form.block_size
        first = part.columns.start // size * size
        return matrix.own.of_parts(self._pieces(part), part.num_rows, part.columns.stop - first)

    def _pieces(self, part: MatrixSlice) -> Iterator[BlockParts]:
        for role, rows in part.parts:
            name, matrix = self._tensor_name(role), self._matrices[role]
            try:
                for each in matrix.parts(rows, part.columns):
                    check_weights(self._store, name, largest_weight(matrix.own.form, each))
                    yield each
            except StoreError as error:
                raise CheckpointError(str(error)) from error
