"""Matrices of folders in the blocks of a GGUF file type, read in their own bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

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


class MatrixInBlocks(CodedMatrix):
    """A packed matrix whose codes are also those of a type of blocks."""

    @property
    @abstractmethod
    def file_blocks(self) -> FileBlocks:
        """The type."""

    @abstractmethod
    def parts(self, rows: range, columns: range) -> Iterator[BlockParts]:
        """These rows of all blocks that have some of the columns, a piece of rows at a time."""


class BlockSource(FloatSource):
    """Reads these matrices, by role, as blocks in their own bits, and the rest as float32."""

    def __init__(self, tensors: CheckpointTensors, matrices: Mapping[str, MatrixInBlocks]) -> None:
        super().__init__(tensors.store, tensors.tensor_name, tensors.norm_offset)
        self._matrices = matrices

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        found = self._matrices.get(part.parts[0][0])
        if found is None:
            return super().matrix(part)
        kind = found.file_blocks
        columns = len(kind.blocks_of(part.columns)) * kind.form.block_size
        return kind.of_parts(self._pieces(part), part.num_rows, columns)

    def _pieces(self, part: MatrixSlice) -> Iterator[BlockParts]:
        for role, rows in part.parts:
            matrix, name = self._matrices[role], self._tensor_name(role)
            try:
                for each in matrix.parts(rows, part.columns):
                    check_weights(self._store, name, largest_weight(matrix.file_blocks.form, each))
                    yield each
            except StoreError as error:
                raise CheckpointError(str(error)) from error
