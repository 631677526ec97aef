"""Kinds of matrices: arrays in a shard's file, and sizes that plans and buffers count.

A weight format makes one of the kinds out of a checkpoint; a back end has one product for each
kind. So a format is a file here, and a kind is a product more in each back end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.models.parts import MatrixSlice, VectorSlice
from edge.offload import WeightStore

Matrix_co = TypeVar("Matrix_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One of the arrays that a matrix is stored as; in the shard's file `<matrix>.<suffix>`."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    stays: bool = False
    """Whether its pages stay in memory until the whole shard is packed."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class MatrixKind(ABC, Generic[Matrix_co]):
    """How matrices are stored and multiplied: frozen data, hashable."""

    arrays_of_all_rows: ClassVar[tuple[str, ...]] = ()
    """Suffixes of arrays that are the same for every row."""

    can_round_inputs: ClassVar[bool]
    """Whether fast products round their inputs to 8 bits."""

    @property
    @abstractmethod
    def words(self) -> str:
        """For people."""

    @property
    @abstractmethod
    def operator(self) -> str:
        """The product, as errors name it."""

    @property
    @abstractmethod
    def bits(self) -> int | None:
        """Bits of a code; None where weights are floats. Products are tuned for it."""

    @property
    @abstractmethod
    def column_multiple(self) -> int:
        """Columns are shared out in multiples of this."""

    @property
    @abstractmethod
    def packed_bytes_per_weight(self) -> float:
        """As the CPU's kernels keep it."""

    @abstractmethod
    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        """What a matrix [rows, columns] is stored as."""

    def padding(self, first_column: int) -> int:
        """Zeros before the inputs of a slice that begins at this column of the whole matrix."""
        return first_column % self.column_multiple

    def arrays_of(self, part: MatrixSlice) -> tuple[StoredArray, ...]:
        """What a shard's slice of a matrix is stored as, with its padding."""
        return self.arrays(part.num_rows, self.padding(part.columns.start) + len(part.columns))

    @abstractmethod
    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> Matrix_co:
        """What kernels are given, of the arrays by suffix; `columns` with padding."""

    @abstractmethod
    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        """The weights [rows, columns] that the arrays stand for."""

    @abstractmethod
    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """By suffix, random values to fill arrays with; products stay as large as inputs."""


class WeightSource(Protocol):
    """Reads slices of one checkpoint in one format; reads no more than the slice needs."""

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        """The arrays that stand for the slice, by suffix."""
        ...

    def vector(self, part: VectorSlice) -> NDArray[np.float32]: ...

    def table(self, role: str, rows: range, columns: range | None = None) -> NDArray[Any]:
        """A part of one of `TABLES` in the checkpoint's own float type."""
        ...

    def close(self) -> None:
        """Let go of files this source opened; the checkpoint itself stays open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """The weights of a checkpoint, and their names there."""

    store: WeightStore
    tensor_name: Callable[[str], str]
    """The name of a role's tensor."""
    matrices: Mapping[str, int]
    """Roles of all that are multiplied with, and their layers' grades."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
