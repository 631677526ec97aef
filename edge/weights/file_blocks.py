"""Weights in the blocks of a GGUF file: as many bits in memory as in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import (
    FORMS,
    TILE_ROWS,
    TILES_VERSION,
    BlockForm,
    BlockParts,
    dequantize,
    random_parts,
    row_blocks,
    rows_of,
    tiles,
)
from edge.weights.block_matrices import Blocks
from edge.weights.block_rounding import BlockRounding
from edge.weights.matrix_kind import MatrixKind, ReadRows, StoredArray

_BLOCKS = "blocks"
_TRANSPOSED = Blocks(8, 32)
"""Finer, because values were rounded in other blocks already."""


@dataclass(frozen=True, slots=True)
class FileBlocks(MatrixKind[NDArray[np.float32]]):
    """Blocks of a type; see edge.kernels.matmul_blocks.reference. Raises ValueError for another."""

    can_round_inputs = True

    type: str
    version: int = TILES_VERSION
    """Version of the layout; stored shards of another one are not used."""

    def __post_init__(self) -> None:
        if self.type not in FORMS or self.version != TILES_VERSION:
            raise ValueError(f"blocks of type {self.type} are not {', '.join(FORMS)}")

    @property
    def form(self) -> BlockForm:
        return FORMS[self.type]

    @property
    def words(self) -> str:
        return f"blocks of {self.type}"

    @property
    def operator(self) -> str:
        return f"block_product in {self.type}"

    @property
    def bits(self) -> int:
        return self.form.bits

    @property
    def column_multiple(self) -> int:
        return self.form.block_size

    @property
    def packed_bytes_per_weight(self) -> float:
        return self.form.bytes_per_weight

    def packed_bytes(self, rows: int, columns: int, padding: int) -> float:
        return sum(each.nbytes for each in self.arrays(rows, padding + columns))

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        blocks = -(-columns // self.form.block_size)
        shape = (-(-rows // TILE_ROWS), blocks * TILE_ROWS * self.form.row_bytes)
        return (StoredArray(suffix=_BLOCKS, dtype="uint8", shape=shape),)

    @property
    def transposed(self) -> Blocks:
        return _TRANSPOSED

    def rounded(self, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        arrays, _largest = BlockRounding(self.form).rounded(values)
        return self.stored(arrays[_BLOCKS])

    def stored(self, rows: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The stored arrays of `row_blocks`."""
        return {_BLOCKS: tiles(self.form, rows)}

    def blocks_of(self, columns: range) -> range:
        """The blocks with these columns."""
        size = self.form.block_size
        return range(columns.start // size, -(-columns.stop // size))

    def some_rows(self, read: ReadRows, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
        numbers = sorted({row // TILE_ROWS for row in rows})
        found = rows_of(self.form, read(_BLOCKS, numbers))
        places = [numbers.index(row // TILE_ROWS) * TILE_ROWS + row % TILE_ROWS for row in rows]
        return {_BLOCKS: tiles(self.form, found[places])}

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return self.floats(stored, columns)

    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return dequantize(self.form, rows_of(self.form, stored(_BLOCKS)))[:, :columns]

    def random(
        self, rows: int, columns: int, random: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        """The stored arrays of a matrix with all codes and levels."""
        return {
            _BLOCKS: tiles(
                self.form, row_blocks(self.form, random_parts(self.form, rows, columns, random))
            )
        }

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        if self.form.has_power:
            # Any of these bytes is a scale of 2^-10 or 2^-9, wherever a block begins.
            return {_BLOCKS: codes & np.uint8(1) | np.uint8(118)}
        if self.form.has_float_levels:
            # Any four of these bytes are a float32 from 0.0007 to 0.003, any one is 1.25 or 1.375.
            return {_BLOCKS: codes & np.uint8(1) | np.uint8(0x3A)}
        # Any two of these bytes are a float16 from 0.0005 to 0.002.
        return {_BLOCKS: codes & np.uint8(7) | np.uint8(16)}

    def of_parts(
        self, pieces: Iterable[BlockParts], rows: int, columns: int
    ) -> dict[str, NDArray[Any]]:
        """The stored arrays of a matrix that is read a piece of rows at a time."""
        form = self.form
        (stored,) = self.arrays(rows, columns)
        found = np.empty(stored.shape, np.uint8)
        rest = np.empty((0, -(-columns // form.block_size), form.row_bytes), np.uint8)
        at = 0  # tiles
        for each in pieces:
            rest = np.concatenate([rest, row_blocks(form, each)])
            if whole := len(rest) // TILE_ROWS:
                found[at : at + whole] = tiles(form, rest[: whole * TILE_ROWS])
                at, rest = at + whole, rest[whole * TILE_ROWS :]
        if len(rest):
            found[at:] = tiles(form, rest)
        return {_BLOCKS: found}
