"""Matrices in 4-bit floats (E2M1), in blocks of 16 that share a float of 8 bits (E4M3): NVFP4.

    codes  uint8 [outputs, inputs / 2]: two codes a byte, the low one first
    scales float8_e4m3 [outputs, inputs / 16]
    factor float32 [] or [1]: a weight is code * (scale * factor)

compressed-tensors calls them weight_packed, weight_scale and weight_global_scale, which has the
inverse of the factor. ModelOpt calls them weight, weight_scale and weight_scale_2. Inputs are not
rounded as these programs would, and the scales of inputs are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import BlockParts
from edge.models.config import Config
from edge.models.parts import MAX_SIZE
from edge.weights.file_blocks import FileBlocks
from edge.weights.packed.block_matrix import E2M1_CODES, E2M1_ZERO, BlockMatrix, halves_of
from edge.weights.packed.matrix import Grid, PackedMatrix, Tensors

_GROUP = 16
_KIND = FileBlocks("NVFP4")
_ALGORITHM = "NVFP4"
_NO_NUMBER = 0x7F


def find_modelopt(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by name. Raises CheckpointError for unsupported or contradictory settings."""
    algorithm = config.values.get("quant_algo")
    if algorithm != _ALGORITHM:
        raise config.error(
            f"quant_algo {algorithm!r:.80} is not read, {_ALGORITHM} is; use another folder"
        )
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".weight_scale_2"):
        weight = f"{layer}.weight"
        found[weight] = nvfp4_matrix(
            tensors, weight, f"{layer}.weight_scale", f"{layer}.weight_scale_2", divides=False
        )
    return found


def nvfp4_matrix(
    tensors: Tensors, codes: str, scales: str, factor: str, *, divides: bool
) -> Nvfp4Matrix:
    """The matrix of these tensors. divides: the last one has the inverse of the factor.

    Raises CheckpointError for contradictory tensors.
    """
    if not tensors.has(codes):
        raise tensors.error(factor, f"has no {codes} beside it", "download all of the folder again")
    rows, halves = tensors.size(codes, ("uint8",))
    columns = 2 * halves
    if columns % _GROUP or columns > MAX_SIZE:
        raise tensors.error(codes, f"has {columns} columns, which are no groups of {_GROUP}")
    tensors.expect(scales, ("float8_e4m3fn",), (rows, columns // _GROUP), codes)
    is_one = tensors.has(factor) and tensors.store.shape(factor) == (1,)
    tensors.expect(factor, ("float32",), (1,) if is_one else (), codes)
    return Nvfp4Matrix(
        store=tensors.store,
        shape=(rows, columns),
        tensors=(codes, scales, factor),
        bits=8,
        group=_GROUP,
        own=_KIND,
        divides=divides,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Nvfp4Matrix(BlockMatrix):
    """divides: the third tensor has the inverse of the factor."""

    divides: bool

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        return E2M1_CODES[self._halves(rows, columns)]

    def grid(self, rows: range, groups: range) -> Grid:
        scales = self.store.read(self.tensors[1], rows=rows, columns=groups).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
            scales *= self._factor() / 2
        return Grid(scales=scales, zeros=float(E2M1_ZERO))

    def some_parts(self, rows: range, blocks: range) -> BlockParts:
        size = self.own.form.block_size
        columns = range(blocks.start * size, blocks.stop * size)
        groups = range(columns.start // _GROUP, columns.stop // _GROUP)
        found: NDArray[Any] = self.store.read(self.tensors[1], rows=rows, columns=groups)
        levels = np.ascontiguousarray(found).view(np.uint8)
        if (levels & _NO_NUMBER == _NO_NUMBER).any():
            raise self._error("has scales that are no numbers; download the folder again")
        shape = len(rows), len(blocks)
        return BlockParts(
            codes=self._halves(rows, columns).reshape(*shape, -1),
            scales=np.full(shape, self._factor()),
            levels=levels.reshape(*shape, -1),
        )

    def _halves(self, rows: range, columns: range) -> NDArray[np.uint8]:
        """From a multiple of two columns on."""
        run = range(columns.start // 2, -(-columns.stop // 2))
        packed: NDArray[np.uint8] = self.store.read(self.tensors[0], rows=rows, columns=run)
        return halves_of(packed)[:, : len(columns)]

    def _factor(self) -> np.float32:
        (found,) = self.store.read(self.tensors[2]).astype(np.float32).reshape(1)
        with np.errstate(divide="ignore", over="ignore"):
            return np.float32(1) / found if self.divides else found
