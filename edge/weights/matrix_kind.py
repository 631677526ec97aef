"""Kinds of matrices: arrays in a shard's file, and sizes that plans and buffers count.

A weight format makes matrices of these kinds from a checkpoint; a back end has a product for each
kind. So a new format is a file here, and a new kind needs a product in each back end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.models.parts import MatrixSlice, VectorSlice
from edge.offload import WeightStore

Matrix_co = TypeVar("Matrix_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One of a matrix's stored arrays, in the shard's file `<matrix>.<suffix>`."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    stays: bool = False
    """Whether its pages stay in memory until the whole shard is packed."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class ReadRows(Protocol):
    """Reads one of a matrix's stored arrays, by suffix."""

    def __call__(self, suffix: str, places: Sequence[int] | None) -> NDArray[Any]:
        """These entries of its first axis; None: all."""
        ...


class MatrixKind(ABC, Generic[Matrix_co]):
    """The storage and product of matrices: frozen data, hashable."""

    arrays_of_all_rows: ClassVar[tuple[str, ...]] = ()
    """Suffixes of arrays that all rows share."""

    can_round_inputs: ClassVar[bool]
    """Whether fast products round their inputs to 8 bits."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Description for people."""

    @property
    @abstractmethod
    def operator(self) -> str:
        """Name of the product in errors."""

    @property
    @abstractmethod
    def bits(self) -> int | None:
        """Bits of a code, for which products are tuned; None for floats."""

    @property
    @abstractmethod
    def column_multiple(self) -> int:
        """Columns are divided among shards in multiples of this."""

    @property
    @abstractmethod
    def packed_bytes_per_weight(self) -> float:
        """Bytes of a weight packed for the CPU's kernels."""

    def packed_bytes(self, rows: int, columns: int, padding: int) -> float:
        """Bytes of a slice packed for the CPU's kernels. padding: see `padding`."""
        return rows * columns * self.packed_bytes_per_weight

    @abstractmethod
    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        """The stored arrays of a matrix [rows, columns]."""

    @property
    def transposed(self) -> MatrixKind[Any]:
        """The kind of a transposed matrix of this kind."""
        return self

    @abstractmethod
    def rounded(self, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """The stored arrays for these values, by suffix."""

    def padding(self, first_column: int) -> int:
        """Zeros before the inputs of a slice that begins at this column of the matrix."""
        return first_column % self.column_multiple

    def some_rows(self, read: ReadRows, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The stored arrays of a matrix of these rows only, by suffix. read: of the whole one."""
        suffixes = [each.suffix for each in self.arrays(1, 1)]
        of_all = self.arrays_of_all_rows
        return {each: read(each, None if each in of_all else rows) for each in suffixes}

    @abstractmethod
    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> Matrix_co:
        """The matrix for kernels. stored: gives its arrays by suffix. columns: with padding."""

    @abstractmethod
    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        """The weights [rows, columns] of these arrays, dequantized. Kinds that store rows in groups
        have further rows at the end."""

    @abstractmethod
    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Random values for arrays, by suffix. Products are then as large as their inputs."""


class WeightSource(Protocol):
    """Reads slices of a checkpoint in a format, and no more than each slice needs."""

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        """The stored arrays of a slice, by suffix."""
        ...

    def unrounded(self, part: MatrixSlice) -> NDArray[np.float32] | None:
        """The weights of a slice that this source rounds; None: it takes them as they are."""
        ...

    def vector(self, part: VectorSlice) -> NDArray[np.float32]: ...

    def table(self, role: str, rows: range, columns: range | None = None) -> NDArray[Any]:
        """A part of one of `TABLES`, in the checkpoint's float type."""
        ...

    def close(self) -> None:
        """Close files that this source opened. The checkpoint itself stays open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """The weights of a checkpoint, and their names there."""

    store: WeightStore
    tensor_name: Callable[[str], str]
    """Gives the name of a role's tensor."""
    matrices: Mapping[str, int]
    """Roles of all matrices that a token is multiplied with, and the grades of their layers."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
