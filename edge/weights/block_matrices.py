"""Weights as integers in blocks of columns that share a scale."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import (
    QuantizedMatrix,
    check_format,
    dequantize,
    pack_zero_points,
    packed_shapes,
    stacked,
    unpack_zero_points,
)
from edge.models.parts import MatrixSlice, VectorSlice
from edge.progress import OnProgress, Progress
from edge.weights.encoding import Encoding
from edge.weights.float_matrices import FloatSource
from edge.weights.matrix_kind import CheckpointTensors, MatrixKind, StoredArray
from edge.weights.quantize import open_quantized
from edge.weights.quantized_store import QuantizedStore
from edge.weights.recipe import Kind, Recipe


@dataclass(frozen=True, slots=True)
class Blocks(MatrixKind[QuantizedMatrix]):
    """Codes of `bits` bits and float32 scales; see edge.kernels.matmul_nbits.reference.

    Raises ValueError for what no kernel has.
    """

    numbers: ClassVar[tuple[str, ...]] = ("code_bits", "block_size")
    operator = "matmul_nbits"
    can_round_inputs = True
    more: ClassVar[str] = ""
    """What blocks have in addition to scales, for people."""

    code_bits: int
    block_size: int

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)

    @property
    def words(self) -> str:
        return f"{self.bits} bits in blocks of {self.block_size}{self.more}"

    @property
    def bits(self) -> int:
        return self.code_bits

    @property
    def column_multiple(self) -> int:
        return self.block_size

    @property
    def packed_bytes_per_weight(self) -> float:
        # The integer kernels keep a float scale and a float sum for each block.
        return self.bits / 8 + 8.0 / self.block_size

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        codes, scales = packed_shapes((rows, columns), self.bits, self.block_size)
        return (
            StoredArray(suffix="codes", dtype="uint8", shape=codes),
            StoredArray(suffix="scales", dtype="float32", shape=scales, stays=True),
        )

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> QuantizedMatrix:
        return QuantizedMatrix(
            codes=stored("codes"),
            scales=stored("scales"),
            bits=self.bits,
            block_size=self.block_size,
            columns=columns,
        )

    def floats(self, stored: Callable[[str], NDArray[Any]], columns: int) -> NDArray[np.float32]:
        return dequantize(self.matrix(stored, columns))

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        # Uniform codes are spread by 2^bits / sqrt(12).
        scale = 12**0.5 / 2**self.bits / columns**0.5
        return {"codes": codes, "scales": np.full(1 << 16, scale, np.float32)}


@dataclass(frozen=True, slots=True)
class ZeroBlocks(Blocks):
    """The same with a zero point for each block: the code that stands for 0."""

    operator = "matmul_nbits with zero points"
    more = " with zero points"

    @property
    def packed_bytes_per_weight(self) -> float:
        return self.bits / 8 + (8.0 + self.bits / 8) / self.block_size

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        codes, scales = Blocks.arrays(self, rows, columns)
        packed = (rows, -(-scales.shape[1] * self.bits // 8))
        zeros = StoredArray(suffix="zero_points", dtype="uint8", shape=packed, stays=True)
        return codes, scales, zeros

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> QuantizedMatrix:
        plain = Blocks.matrix(self, stored, columns)
        num_blocks = plain.scales.shape[1]
        zeros = unpack_zero_points(stored("zero_points"), self.bits, num_blocks)
        return replace(plain, zero_points=zeros)

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        # Twice the variance, as the zero points are as uniform as the codes.
        made = Blocks.made_up(self, 2 * columns, normal=normal, codes=codes)
        return {**made, "zero_points": codes}


@dataclass(frozen=True, slots=True)
class OffsetBlocks(Blocks):
    """The same with a float32 offset for each block: files that keep the least weight of each."""

    operator = "matmul_nbits with offsets"
    more = " with offsets"

    @property
    def packed_bytes_per_weight(self) -> float:
        return self.bits / 8 + 12.0 / self.block_size

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        codes, scales = Blocks.arrays(self, rows, columns)
        return codes, scales, replace(scales, suffix="offsets")

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> QuantizedMatrix:
        return replace(Blocks.matrix(self, stored, columns), offsets=stored("offsets"))

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        made = Blocks.made_up(self, columns, normal=normal, codes=codes)
        return {**made, "offsets": made["scales"]}


class _Sorted(Blocks):
    """Columns are stored in an order of their own, so that those of a group lie side by side.

    Never cut by columns. order_number tells matrices apart that are fused and are not in one order.
    """

    __slots__ = ()

    numbers = ("code_bits", "block_size", "order_number")
    arrays_of_all_rows = ("order",)

    def arrays(self, rows: int, columns: int) -> tuple[StoredArray, ...]:
        order = StoredArray(suffix="order", dtype="int32", shape=(columns,), stays=True)
        return (*super().arrays(rows, columns), order)

    def matrix(self, stored: Callable[[str], NDArray[Any]], columns: int) -> QuantizedMatrix:
        return replace(super().matrix(stored, columns), order=stored("order"))

    def made_up(
        self, columns: int, *, normal: NDArray[np.float32], codes: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        made = super().made_up(columns, normal=normal, codes=codes)
        return {**made, "order": np.arange(columns, dtype=np.int32)}


@dataclass(frozen=True, slots=True)
class SortedBlocks(_Sorted, Blocks):
    """Blocks of columns in act-order."""

    operator = "matmul_nbits in act-order"
    more = " in act-order"

    order_number: int


@dataclass(frozen=True, slots=True)
class SortedZeroBlocks(_Sorted, ZeroBlocks):
    """The same with zero points."""

    operator = "matmul_nbits with zero points in act-order"
    more = " with zero points in act-order"

    order_number: int


@dataclass(frozen=True, slots=True)
class SortedOffsetBlocks(_Sorted, OffsetBlocks):
    """The same with offsets."""

    operator = "matmul_nbits with offsets in act-order"
    more = " with offsets in act-order"

    order_number: int


SORTED: dict[type[Blocks], type[SortedBlocks | SortedZeroBlocks | SortedOffsetBlocks]] = {
    Blocks: SortedBlocks,
    ZeroBlocks: SortedZeroBlocks,
    OffsetBlocks: SortedOffsetBlocks,
}
"""The same in act-order."""


def stored_arrays(matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """By suffix, what a matrix of blocks is stored as, of whichever kind."""
    arrays: dict[str, NDArray[Any]] = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zero_points is not None:
        arrays["zero_points"] = pack_zero_points(matrix.zero_points, matrix.bits)
    if matrix.offsets is not None:
        arrays["offsets"] = matrix.offsets
    if matrix.order is not None:
        arrays["order"] = matrix.order
    return arrays


class QuantizedSource:
    """Matrices from quantised caches, one for each kind; the rest as float32."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        recipe: Recipe,
        quantized: Mapping[Kind, QuantizedStore],
    ) -> None:
        self._floats = FloatSource(tensors.store, tensors.tensor_name, tensors.norm_offset)
        self._recipe = recipe
        self._quantized = quantized
        self._tensor_name = tensors.tensor_name

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        role, rows = part.parts[0]
        store = self._quantized.get(self._recipe.kind(role, part.grade))
        if store is None:
            return self._floats.matrix(part)
        name = self._tensor_name(role)
        whole_rows, whole_columns = store.matrix(name)
        if len(part.columns) != whole_columns:
            assert rows == range(whole_rows)
            assert len(part.parts) == 1
            matrix, _padding = store.columns(name, part.columns)
            return stored_arrays(matrix)
        pieces = [store.rows(self._tensor_name(role), rows) for role, rows in part.parts]
        return stored_arrays(stacked(pieces))

    def vector(self, part: VectorSlice) -> NDArray[np.float32]:
        return self._floats.vector(part)

    def table(self, role: str, rows: range, columns: range | None = None) -> NDArray[Any]:
        return self._floats.table(role, rows, columns)

    def close(self) -> None:
        for store in self._quantized.values():
            store.close()


def mixed(recipe: Recipe, grades: tuple[int, ...] = ()) -> Encoding:
    """Matrices of blocks are quantised once, as a whole; then read from the cache of that."""

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> QuantizedSource:
        names: dict[Kind, list[str]] = {}
        for role, grade in tensors.matrices.items():
            names.setdefault(recipe.kind(role, grade), []).append(tensors.tensor_name(role))
        shapes = {name: tensors.store.shape(name) for each in names.values() for name in each}
        total, before = sum(map(math.prod, shapes.values())), 0
        with contextlib.ExitStack() as on_error:
            quantized: dict[Kind, QuantizedStore] = {}
            for kind, members in names.items():
                if isinstance(kind, Blocks):
                    quantized[kind] = open_quantized(
                        tensors.store,
                        sorted(members),
                        bits=kind.bits,
                        block_size=kind.block_size,
                        zero_points=isinstance(kind, ZeroBlocks),
                        cache_root=cache_root,
                        progress=_Part(on_progress=on_progress, before=before, total=total),
                    )
                    on_error.callback(quantized[kind].close)
                before += sum(math.prod(shapes[name]) for name in members)
            on_error.pop_all()
        return QuantizedSource(tensors, recipe, quantized)

    return Encoding(recipe=recipe, grades=grades, open=open_source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Progress of one kind's matrices, as that of all."""

    on_progress: OnProgress
    before: int
    total: int

    def __call__(self, done: int, _total: int) -> None:
        done += self.before
        self.on_progress(Progress(phase="quantise", peer="", done=done, total=self.total))
