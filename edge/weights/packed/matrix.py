"""One packed matrix of a folder: codes and scales.

Every layout of codes is a class with two methods: codes in the kernels' form, and their scales. The
rest follows from these, exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_nbits.reference import LEAST_BLOCK, QuantizedMatrix, pack, unpack
from edge.models.parts import MAX_SIZE
from edge.offload import WeightStore
from edge.weights.block_matrices import Blocks

CODE_BITS = (2, 4, 8)
FLOATS = ("float16", "bfloat16", "float32")
INTEGERS = ("int32", "uint32")

_CHUNK_WEIGHTS = 1 << 22
"""Weights that are unpacked at once, which takes about ten bytes each."""
_CHUNK_COLUMNS = 256
"""Columns that are unpacked at once: a multiple of every block, and of the codes in a word."""
_BLOCK_SIZES = (256, 128, 64, 32, 16)
_USUAL_BLOCK = 128
"""Columns of a block if one scale serves many more columns."""
_ZERO_BYTES = {2: 0xAA, 4: 0x88, 8: 0x80}


class PackedMatrix(ABC):
    """A matrix [rows, columns] of weights in packed tensors.

    shape: (rows, columns); rows are outputs. tensors: with its values, the first one for errors.
    """

    shape: tuple[int, int]
    tensors: tuple[str, ...]

    @abstractmethod
    def floats(self, rows: range, columns: range) -> NDArray[np.float32]:
        """The exact weights [rows, columns]. Raises StoreError, CheckpointError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Dequantization: weight = (code - zero) * scale + bias; all float32 [rows, groups].

    zeros: one number if it is the same everywhere.
    """

    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | float
    biases: NDArray[np.float32] | None = None

    def of(self, groups: NDArray[np.integer]) -> Grid:
        """The grid of these groups, in this order."""
        zeros, biases = self.zeros, self.biases
        return Grid(
            scales=self.scales[:, groups],
            zeros=zeros if isinstance(zeros, float) else zeros[:, groups],
            biases=None if biases is None else biases[:, groups],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedMatrix(PackedMatrix):
    """Codes of `bits` bits, of which `group` columns share a scale.

    zero_points: each group has a code that stands for 0. offsets: each group has an offset, and
    perhaps no such code. With neither, the middle code is 0. is_shuffled: the columns of a group
    are scattered, so that no blocks of neighbours hold it. Raises CheckpointError for unsupported
    matrices.
    """

    store: WeightStore
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    bits: int
    group: int
    zero_points: bool = False
    offsets: bool = False
    is_shuffled: bool = False
    first: int = 0
    """Number of rows of the tensors before its first."""

    inputs_first = False
    """Whether files are ordered by inputs, so that runs of columns are read fast."""

    @property
    def block_size(self) -> int:
        """Columns of a kernel's block: a group, or a part of one, with repeated scales."""
        return next(size for size in _BLOCK_SIZES if self._fits(size))

    @property
    def kind(self) -> Blocks:
        """The kind of the matrix; of a shuffled one, with columns sorted by group."""
        return Blocks(self.bits, self.block_size, self.zero_points, self.offsets)

    def sorted_columns(self) -> NDArray[np.int32] | None:
        """Columns sorted by group; None if a group other than the last lacks `group` columns."""
        of_column = self.group_of(range(self.shape[1]))
        counts = np.bincount(of_column, minlength=-(-self.shape[1] // self.group))
        if (counts[:-1] != self.group).any():
            return None
        return np.argsort(of_column, kind="stable").astype(np.int32)

    @abstractmethod
    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        """Bytes [rows, …] of codes in the kernels' packing, of whole words; more may follow.

        rows: of the tensors. columns: from a multiple of the codes in 32 bits on.
        """

    @abstractmethod
    def grid(self, rows: range, groups: range) -> Grid: ...

    def words_of(self, run: range) -> range:
        """The words of 32 bits with these codes, if codes are consecutive."""
        word = 32 // self.bits
        return range(run.start // word, -(-run.stop // word))

    def group_of(self, columns: range) -> NDArray[np.int32]:
        """The group of each of these columns."""
        return np.arange(columns.start, columns.stop, dtype=np.int32) // np.int32(self.group)

    def blocks(self, rows: range, columns: range) -> tuple[QuantizedMatrix, int]:
        """These rows of all blocks that have some of the columns, and their first column."""
        size, per_byte = self.block_size, 8 // self.bits
        numbers = range(columns.start // size, -(-columns.stop // size))
        whole = range(numbers.start * size, min(numbers.stop * size, self.shape[1]))
        shape = (len(rows), len(numbers), size * self.bits // 8)
        codes = np.full(shape, _ZERO_BYTES[self.bits], np.uint8)
        flat = codes.reshape(len(rows), -1)
        for few, part in self._pieces(rows, whole):
            first = (part.start - whole.start) // per_byte
            width = -(-len(part) // per_byte)
            found = self.codes(_shifted(few, self.first), part)[:, :width]
            if len(part) % per_byte:  # beyond the end, use the code of zero
                found[:, -1] = found[:, -1] & 0x0F | 0x80
            flat[few.start - rows.start : few.stop - rows.start, first : first + width] = found
        groups = range(whole.start // self.group, -(-whole.stop // self.group))
        grid = self.grid(_shifted(rows, self.first), groups)
        if size != self.group:
            grid = grid.of(np.arange(whole.start, whole.stop, size) // self.group - groups.start)
        matrix = QuantizedMatrix(
            codes=codes,
            scales=grid.scales,
            zero_points=self._zero_points(grid),
            offsets=self._offsets(grid),
            bits=self.bits,
            block_size=size,
            columns=len(whole),
        )
        return matrix, whole.start

    def sorted_blocks(self, rows: range, order: NDArray[np.int32]) -> QuantizedMatrix:
        """These rows of all blocks, with the columns in the order of `sorted_columns`."""
        columns = self.shape[1]
        codes = np.empty((len(rows), columns), np.uint8)
        for few, part in self._pieces(rows, range(columns)):
            place = slice(few.start - rows.start, few.stop - rows.start)
            found = unpack(self.codes(_shifted(few, self.first), part), self.bits)
            codes[place, part.start : part.stop] = found[:, : len(part)]
        grid = self.grid(_shifted(rows, self.first), range(-(-columns // self.group)))
        size = self.block_size
        missing = -columns % size
        padded = np.pad(
            codes[:, order], [(0, 0), (0, missing)], constant_values=1 << (self.bits - 1)
        )
        if size != self.group:
            grid = grid.of(np.arange(0, columns, size) // self.group)
        return QuantizedMatrix(
            codes=pack(padded, self.bits).reshape(len(rows), -1, size * self.bits // 8),
            scales=grid.scales,
            zero_points=self._zero_points(grid),
            offsets=self._offsets(grid),
            order=order,
            bits=self.bits,
            block_size=size,
            columns=columns,
        )

    def floats(self, rows: range, columns: range) -> NDArray[np.float32]:
        result = np.empty((len(rows), len(columns)), np.float32)
        if result.size == 0:
            return result
        of_column = self.group_of(columns)
        groups = range(int(of_column.min()), int(of_column.max()) + 1)
        grid, of_column = self.grid(_shifted(rows, self.first), groups), of_column - groups.start
        word = 32 // self.bits
        whole = range(columns.start // word * word, columns.stop)
        for few, part in self._pieces(rows, whole):
            kept = range(max(part.start, columns.start), part.stop)
            codes = unpack(self.codes(_shifted(few, self.first), part), self.bits)
            values = codes[:, kept.start - part.start :][:, : len(kept)].astype(np.float32)
            at = of_column[kept.start - columns.start : kept.stop - columns.start]
            place = slice(few.start - rows.start, few.stop - rows.start)
            with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
                values -= grid.zeros if isinstance(grid.zeros, float) else grid.zeros[place][:, at]
                values *= grid.scales[place][:, at]
                if grid.biases is not None:
                    values += grid.biases[place][:, at]
            result[place, kept.start - columns.start : kept.stop - columns.start] = values
        return result

    def _zero_points(self, grid: Grid) -> NDArray[np.uint8] | None:
        """Zero points of blocks; None without any. Raises CheckpointError for invalid ones."""
        if self.offsets:
            return None
        if not self.zero_points:
            if not np.all(grid.zeros == 1 << (self.bits - 1)):
                raise self._error(
                    "has zero points, but config.json says that it has none (sym); set sym to "
                    "false there"
                )
            return None
        zeros = np.broadcast_to(grid.zeros, grid.scales.shape)
        if not ((zeros >= 0) & (zeros < 1 << self.bits)).all():
            raise self._error("has zero points that are no codes; download the folder again")
        return zeros.astype(np.uint8)

    def _offsets(self, grid: Grid) -> NDArray[np.float32] | None:
        """Offsets of blocks from the middle code; None without offsets."""
        if not self.offsets:
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
            offsets = (np.float32(1 << (self.bits - 1)) - grid.zeros) * grid.scales
            if grid.biases is not None:
                offsets += grid.biases
        return offsets.astype(np.float32, copy=False)

    def _error(self, problem: str) -> CheckpointError:
        name = self.tensors[0]
        return CheckpointError(f"tensor {name} in {self.store.where(name)} {problem}")

    def _fits(self, size: int) -> bool:
        if self.group in _BLOCK_SIZES:
            return size == self.group
        if self.group >= self.shape[1]:  # one scale for each row, so blocks may be partial
            return size == _USUAL_BLOCK
        return LEAST_BLOCK[self.bits] <= size <= _USUAL_BLOCK and self.group % size == 0

    def _pieces(self, rows: range, columns: range) -> Iterator[tuple[range, range]]:
        """Parts that are small enough to unpack in little memory."""
        if self.inputs_first:
            step = max(1, _CHUNK_WEIGHTS // len(rows) // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
            for first in range(columns.start, columns.stop, step):
                yield rows, range(first, min(first + step, columns.stop))
        else:
            step = max(1, _CHUNK_WEIGHTS // len(columns))
            for first in range(rows.start, rows.stop, step):
                yield range(first, min(first + step, rows.stop)), columns


class _SomeRows(PackedMatrix):
    """Some rows of another packed matrix."""

    def __init__(self, whole: PackedMatrix, rows: range) -> None:
        self._whole, self._first = whole, rows.start
        self.shape = (len(rows), whole.shape[1])
        self.tensors = whole.tensors

    def floats(self, rows: range, columns: range) -> NDArray[np.float32]:
        return self._whole.floats(_shifted(rows, self._first), columns)


def rows_of(whole: PackedMatrix, rows: range) -> PackedMatrix:
    """Some rows of a matrix as a matrix."""
    if not isinstance(whole, CodedMatrix):
        return _SomeRows(whole, rows)
    shape = len(rows), whole.shape[1]
    return replace(whole, shape=shape, first=whole.first + rows.start)


def _shifted(rows: range, first: int) -> range:
    return range(first + rows.start, first + rows.stop)


class Tensors:
    """The tensors of a folder, and errors about contradictory ones.

    source: of the configuration, for errors.
    """

    def __init__(self, store: WeightStore, source: str) -> None:
        self.store = store
        self.source = source
        self._present = frozenset(store.names())

    def names(self, suffix: str) -> list[str]:
        """Names, without the suffix, of all tensors that end in it."""
        return [name[: -len(suffix)] for name in self.store.names() if name.endswith(suffix)]

    def has(self, name: str) -> bool:
        return name in self._present

    def size(self, name: str, types: tuple[str, ...]) -> tuple[int, int]:
        """Rows and columns of a matrix, with which other shapes are compared."""
        shape = self._shape(name, types)
        if len(shape) != 2 or not all(0 < each <= MAX_SIZE for each in shape):
            raise self.error(name, f"has shape {list(shape)}, which is no matrix of codes")
        return shape[0], shape[1]

    def expect(self, name: str, types: tuple[str, ...], shape: tuple[int, ...], of: str) -> str:
        """`name`. Raises CheckpointError unless it exists with this shape, as tensor `of` needs."""
        if not self.has(name):
            raise self.error(of, f"has no {name} beside it", "download all of the folder again")
        found = self._shape(name, types)
        if found != shape:
            raise self.error(
                name, f"has shape {list(found)}; {of} and the configuration make it {list(shape)}"
            )
        return name

    def alone(self, name: str, of: str) -> str:
        """`name`. Raises CheckpointError if it exists, because `of` has the same weights."""
        if self.has(name):
            raise self.error(of, f"is there twice: {name} would be the same weights")
        return name

    def error(
        self,
        name: str,
        problem: str,
        remedy: str = "the folder holds parts of several models, "
        "or its configuration was changed: download all of it again",
    ) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tensor {name} in {self.store.where(name)} {problem}",
            remedy=remedy,
        )

    def is_shuffled(self, order: str, group: int, groups: int) -> bool:
        """Whether the columns of a group are scattered, by the tensor of their groups."""
        found = group_numbers(self.store, order, groups)
        return bool((found != np.arange(len(found)) // group).any())

    def check_group(self, group: int, of: str, bits: int) -> int:
        """`group`. Raises CheckpointError for groups into which no block fits."""
        if group < 1 or group % LEAST_BLOCK[bits]:
            raise self.error(
                of,
                f"has a scale for {group} columns; with {bits} bits multiples of "
                f"{LEAST_BLOCK[bits]} are read",
                "use another quantisation of the model",
            )
        return group

    def _shape(self, name: str, types: tuple[str, ...]) -> tuple[int, ...]:
        found = self.store.dtype(name).name
        if found not in types:
            raise self.error(
                name, f"is {found}, where {' or '.join(types)} is read", "use another folder"
            )
        return self.store.shape(name)


def group_numbers(
    store: WeightStore, name: str, groups: int, columns: range | None = None
) -> NDArray[np.int32]:
    """The group of each column, or of some, by a tensor. Raises CheckpointError."""
    found: NDArray[np.int32] = store.read(name, rows=columns).astype(np.int32)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise CheckpointError(
            f"tensor {name} in {store.where(name)} names groups beyond the {groups} of its matrix",
            remedy="download the folder again",
        )
    return found
