"""Slices of matrices that lie quantised in safetensors files.

A rounding gives each matrix some tensors, `<name>.<suffix>`, whose first axes are its rows and its
blocks. Reads them; edge.weights.quantize makes them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import CapacityError, CheckpointError
from edge.host.cache_paths import cache_remedy
from edge.kernels.matmul_nbits.reference import (
    QuantizedMatrix,
    check_format,
    check_range,
    packed_shapes,
    quantize,
    slice_columns,
)
from edge.offload import Closing, FolderUse, SafetensorsFile, StoreError, StoreFullError
from edge.weights.weight_limits import largest_of


class Rounding(Protocol):
    """A way to round matrices to blocks along their columns."""

    @property
    def key(self) -> str:
        """Its part of the folder's name."""
        ...

    def arrays(self, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{suffix: (type, shape)} in a safetensors file."""
        ...

    def rounded(self, weight: NDArray[np.generic]) -> tuple[dict[str, NDArray[Any]], float]:
        """The arrays of weights [rows, columns], and a bound of the largest one.

        Deterministic: a row's result depends on that row alone. Raises ValueError for NaN and
        infinity.
        """
        ...


def tensors_of(
    rounding: Rounding, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor: (type, shape)} in a safetensors file for matrices {name: (rows, columns)}."""
    return {
        f"{name}.{suffix}": array
        for name, shape in shapes.items()
        for suffix, array in rounding.arrays(*shape).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """The rounding of weights. Raises ValueError for a format that does not exist."""

    bits: int
    block_size: int
    zero_points: bool = False

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)

    @property
    def key(self) -> str:
        return f"int{self.bits}{'z' if self.zero_points else ''}-{self.block_size}"

    def arrays(self, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        codes, scales = packed_shapes((rows, columns), self.bits, self.block_size)
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            "codes": ("U8", codes),
            "scales": ("F32", scales),
        }
        if self.zero_points:
            arrays["zero_points"] = ("U8", scales)
        return arrays

    def rounded(self, weight: NDArray[np.generic]) -> tuple[dict[str, NDArray[Any]], float]:
        part = quantize(
            weight,
            bits=self.bits,
            block_size=self.block_size,
            zero_points=self.zero_points,
            num_threads=1,
        )
        arrays: dict[str, NDArray[Any]] = {"codes": part.codes, "scales": part.scales}
        if part.zero_points is not None:
            arrays["zero_points"] = part.zero_points
        return arrays, largest_of(part.scales) * part.zero_code

    def matrix(self, arrays: Mapping[str, NDArray[Any]], columns: int) -> QuantizedMatrix:
        """The matrix of such arrays."""
        return QuantizedMatrix(
            codes=arrays["codes"],
            scales=arrays["scales"],
            zero_points=arrays.get("zero_points"),
            bits=self.bits,
            block_size=self.block_size,
            columns=columns,
        )


class QuantizedStore(Closing):
    """Slices of quantised matrices [rows, columns]; safe to read from several threads at once.

    The folder is kept from eviction until `close`. Reading raises CheckpointError if the cache was
    damaged meanwhile, and ValueError for an unknown matrix or a run outside it.
    """

    def __init__(
        self,
        use: FolderUse,
        places: Mapping[str, SafetensorsFile],
        shapes: Mapping[str, tuple[int, int]],
        rounding: Rounding,
    ) -> None:
        self._rounding = rounding
        self._use = use
        self._places = places
        self._shapes = shapes

    @property
    def fingerprint(self) -> str:
        """Hash of the checkpoint, the format and the version of rounding."""
        return self._use.folder.name

    def names(self) -> tuple[str, ...]:
        """Names of the requested matrices, sorted."""
        return tuple(sorted(self._shapes))

    def matrix(self, name: str) -> tuple[int, int]:
        """(rows, columns) of the whole matrix."""
        if name not in self._shapes:
            raise ValueError(f"{name!r} is not one of the quantised matrices")
        return self._shapes[name]

    def rows(self, name: str, rows: range) -> QuantizedMatrix:
        """The outputs in `rows` of a matrix in a QuantizedFormat, read from the disk alone."""
        assert isinstance(self._rounding, QuantizedFormat)
        num_rows, columns = self.matrix(name)
        check_range(rows, num_rows, "rows")
        return self._rounding.matrix(self.arrays(name, (rows,)), columns)

    def columns(self, name: str, columns: range) -> tuple[QuantizedMatrix, int]:
        """The inputs in `columns`, extended to the left like `slice_columns`, and by how many."""
        assert isinstance(self._rounding, QuantizedFormat)
        num_rows, num_columns = self.matrix(name)
        check_range(columns, num_columns, "columns")
        size = self._rounding.block_size
        first = columns.start // size
        last = -(-columns.stop // size)
        begin = first * size
        width = min(last * size, num_columns) - begin
        arrays = self.arrays(name, (range(num_rows), range(first, last)))
        blocks = self._rounding.matrix(arrays, width)
        return slice_columns(blocks, range(columns.start - begin, columns.stop - begin))

    def arrays(self, name: str, runs: Sequence[range]) -> dict[str, NDArray[Any]]:
        """A matrix's arrays by suffix. runs: of its rows, and of its blocks."""
        with store_errors_as_edge_errors():
            return {
                suffix: self._places[tensor].read(tensor, runs)
                for suffix in self._rounding.arrays(*self.matrix(name))
                for tensor in (f"{name}.{suffix}",)
            }

    def close(self) -> None:
        """Close the files and let the cache evict the folder. May be called again."""
        for file in self._places.values():
            file.close()
        self._use.close()


@contextlib.contextmanager
def store_errors_as_edge_errors() -> Iterator[None]:
    """Raises CapacityError for a lack of room, CheckpointError for every other StoreError."""
    try:
        yield
    except StoreFullError as error:
        raise CapacityError(str(error), remedy=cache_remedy(str(error))) from error
    except StoreError as error:
        raise CheckpointError(str(error), remedy=cache_remedy(str(error))) from error
