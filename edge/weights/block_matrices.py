"""Weights as integers in blocks of columns that share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import (
    QuantizedMatrix,
    check_format,
    dequantize,
    pack_zero_points,
    packed_shapes,
    quantize,
    unpack_zero_points,
)
from edge.weights.matrix_kind import MatrixKind, StoredArray

_TRANSPOSED_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Blocks(MatrixKind[QuantizedMatrix]):
    """Codes of `code_bits` bits, and float32 scales; see edge.kernels.matmul_nbits.reference.

    Raises ValueError for combinations without a kernel.
    """

    can_round_inputs = True
    arrays_of_all_rows = ("order",)

    code_bits: int
    block_size: int
    zero_points: bool = False
    """Whether each block has a code that stands for 0."""
    offsets: bool = False
    """Whether each block has a float32 offset, as in files with the least weight of each block."""
    order_number: int | None = None
    """Set if columns are stored sorted by group (act-order) and are never cut. Fused matrices in
    different orders have different numbers."""

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)

    @property
    def words(self) -> str:
        return f"{self.bits} bits in blocks of {self.block_size}{self._more}"

    @property
    def operator(self) -> str:
        return f"matmul_nbits{self._more}"

    @property
    def _more(self) -> str:
        """The parts of blocks in addition to scales, for people."""
        names = {
            " with zero points": self.zero_points,
            " with offsets": self.offsets,
            " in act-order": self.is_sorted,
        }
        return "".join(name for name, is_there in names.items() if is_there)

    @property
    def is_sorted(self) -> bool:
        """Whether columns are stored sorted by group."""
        return self.order_number is not None

    @property
    def bits(self) -> int:
        return self.code_bits

    @property
    def column_multiple(self) -> int:
        return self.block_size

    @property
    def packed_bytes_per_weight(self) -> float:
        # The integer kernels keep a float scale and a float sum for each block.
        of_block = 8.0 + self.zero_points * self.bits / 8 + 4.0 * self.offsets
        return self.bits / 8 + of_block / self.block_size

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        codes, scales = packed_shapes((rows, columns), self.bits, self.block_size)
        arrays = [
            StoredArray(suffix="codes", dtype="uint8", shape=codes),
            StoredArray(suffix="scales", dtype="float32", shape=scales, stays=True),
        ]
        if self.zero_points:
            packed = (rows, -(-scales[1] * self.bits // 8))
            arrays.append(
                StoredArray(suffix="zero_points", dtype="uint8", shape=packed, stays=True)
            )
        if self.offsets:
            arrays.append(StoredArray(suffix="offsets", dtype="float32", shape=scales, stays=True))
        if self.is_sorted:
            arrays.append(StoredArray(suffix="order", dtype="int32", shape=(columns,), stays=True))
        return tuple(arrays)

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> QuantizedMatrix:
        scales, zeros = stored("scales"), None
        if self.zero_points:
            zeros = unpack_zero_points(stored("zero_points"), self.bits, scales.shape[1])
        return QuantizedMatrix(
            codes=stored("codes"),
            scales=scales,
            zero_points=zeros,
            offsets=stored("offsets") if self.offsets else None,
            order=stored("order") if self.is_sorted else None,
            bits=self.bits,
            block_size=self.block_size,
            columns=columns,
        )

    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return dequantize(self.matrix(stored, columns))

    @property
    def transposed(self) -> Blocks:
        """Finer, because some sources have rounded its values already, in other blocks."""
        return Blocks(8, _TRANSPOSED_BLOCK)

    def rounded(self, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        return stored_arrays(quantize(values, bits=self.bits, block_size=self.block_size))

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        # Uniform codes are spread by 2^bits / sqrt(12); zero points as uniform double the variance.
        variance = columns * (2 if self.zero_points else 1)
        scales = np.full(1 << 16, 12**0.5 / 2**self.bits / variance**0.5, np.float32)
        made: dict[str, NDArray[Any]] = {
            "codes": codes,
            "scales": scales,
            "zero_points": codes,
            "offsets": scales,
            "order": np.arange(columns, dtype=np.int32),
        }
        return {each.suffix: made[each.suffix] for each in self.arrays(1, columns)}


def stored_arrays(matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """Arrays of a matrix of blocks of any kind, by suffix."""
    arrays: dict[str, NDArray[Any]] = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zero_points is not None:
        arrays["zero_points"] = pack_zero_points(matrix.zero_points, matrix.bits)
    if matrix.offsets is not None:
        arrays["offsets"] = matrix.offsets
    if matrix.order is not None:
        arrays["order"] = matrix.order
    return arrays
