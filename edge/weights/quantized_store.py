"""Slices of matrices that lie quantised in safetensors files.

Each matrix is two tensors, `<name>.codes` and `<name>.scales`, or three with `<name>.zero_points`,
laid out as edge.kernels.matmul_nbits.reference says. Reads them; edge.weights.quantize makes them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge.errors import CapacityError, CheckpointError
from edge.host.cache_paths import cache_remedy
from edge.kernels.matmul_nbits.reference import (
    QuantizedMatrix,
    check_format,
    check_range,
    packed_shapes,
    slice_columns,
)
from edge.offload import Closing, FolderUse, SafetensorsFile, StoreError, StoreFullError


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """The rounding of weights. Raises ValueError for a format that does not exist."""

    bits: int
    block_size: int
    zero_points: bool = False

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)

    def tensors(
        self, shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{tensor: (type, shape)} in a safetensors file for matrices {name: (rows, columns)}."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            codes, scales = packed_shapes(shape, self.bits, self.block_size)
            tensors[codes_name(name)] = ("U8", codes)
            tensors[scales_name(name)] = ("F32", scales)
            if self.zero_points:
                tensors[zeros_name(name)] = ("U8", scales)
        return tensors


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
        weight_format: QuantizedFormat,
    ) -> None:
        self.bits = weight_format.bits
        self.block_size = weight_format.block_size
        self._has_zeros = weight_format.zero_points
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
        """The outputs in `rows`, read from the disk alone."""
        num_rows, columns = self.matrix(name)
        check_range(rows, num_rows, "rows")
        return self._read(name, (rows,), columns)

    def columns(self, name: str, columns: range) -> tuple[QuantizedMatrix, int]:
        """The inputs in `columns`, extended to the left like `slice_columns`, and by how many."""
        num_rows, num_columns = self.matrix(name)
        check_range(columns, num_columns, "columns")
        first = columns.start // self.block_size
        last = -(-columns.stop // self.block_size)
        begin = first * self.block_size
        width = min(last * self.block_size, num_columns) - begin
        blocks = self._read(name, (range(num_rows), range(first, last)), width)
        return slice_columns(blocks, range(columns.start - begin, columns.stop - begin))

    def close(self) -> None:
        """Close the files and let the cache evict the folder. May be called again."""
        for file in self._places.values():
            file.close()
        self._use.close()

    def _read(self, name: str, runs: Sequence[range], columns: int) -> QuantizedMatrix:
        with store_errors_as_edge_errors():
            return QuantizedMatrix(
                codes=self._places[codes_name(name)].read(codes_name(name), runs),
                scales=self._places[scales_name(name)].read(scales_name(name), runs),
                zero_points=self._places[zeros_name(name)].read(zeros_name(name), runs)
                if self._has_zeros
                else None,
                bits=self.bits,
                block_size=self.block_size,
                columns=columns,
            )


@contextlib.contextmanager
def store_errors_as_edge_errors() -> Iterator[None]:
    """Raises CapacityError for a lack of room, CheckpointError for every other StoreError."""
    try:
        yield
    except StoreFullError as error:
        raise CapacityError(str(error), remedy=cache_remedy(str(error))) from error
    except StoreError as error:
        raise CheckpointError(str(error), remedy=cache_remedy(str(error))) from error


def codes_name(matrix: str) -> str:
    """The tensor that holds a matrix's codes."""
    return f"{matrix}.codes"


def scales_name(matrix: str) -> str:
    """The tensor that holds a matrix's scales."""
    return f"{matrix}.scales"


def zeros_name(matrix: str) -> str:
    """The tensor that holds the zero point of each block."""
    return f"{matrix}.zero_points"
