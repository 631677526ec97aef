"""Matrices of 8-bit floats (E4M3 or E5M2), with one scale, or one for each row or block.

    weight float8 [outputs, inputs]
    weight_scale_inv, or weight_scale: float, a factor under either name:
        [], [1], [outputs], [outputs, 1], or [blocks of outputs, blocks of inputs]

Blocks of integers cannot hold them, so they are read as float32, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.models.config import Config
from edge.models.parts import MAX_SIZE
from edge.offload import WeightStore
from edge.weights.packed.matrix import FLOATS, PackedMatrix, Tensors

_TYPES = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("weight_scale_inv", "weight_scale")
_CHUNK_WEIGHTS = 1 << 22


def find_fp8(
    config: Config, tensors: Tensors, blocks: tuple[int, int] | None = None
) -> dict[str, PackedMatrix]:
    """Matrices by name. blocks: rows and columns that share a scale.

    Raises CheckpointError for unsupported or contradictory settings.
    """
    if blocks is None and config.values.get("weight_block_size") is not None:
        blocks = block_of(config, "weight_block_size")
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".weight"):
        weight = f"{layer}.weight"
        if tensors.store.dtype(weight).name in _TYPES:
            rows, columns = tensors.size(weight, _TYPES)
            scales = [each for each in _SCALES if tensors.has(f"{layer}.{each}")]
            if not scales:
                raise tensors.error(weight, f"is of 8 bits and has no {layer}.{_SCALES[0]}")
            name = f"{layer}.{scales[0]}"
            shape = tensors.store.shape(name)
            block = _block(shape, rows, columns, blocks)
            if block is None:
                made = "one number, or one for each row"
                if blocks is not None:
                    made = str([-(-rows // blocks[0]), -(-columns // blocks[1])])
                raise tensors.error(
                    name, f"has shape {list(shape)}; {weight} and the configuration make it {made}"
                )
            tensors.expect(name, FLOATS, shape, weight)
            found[weight] = Fp8Matrix(
                store=tensors.store, shape=(rows, columns), tensors=(weight, name), block=block
            )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8Matrix(PackedMatrix):
    """A matrix of 8-bit floats. block: rows and columns that share a scale."""

    store: WeightStore
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    block: tuple[int, int]

    def floats(self, rows: range, columns: range) -> NDArray[np.float32]:
        result = np.empty((len(rows), len(columns)), np.float32)
        if result.size == 0:
            return result
        scales, down, across = self._scales(rows, columns)
        step = max(1, _CHUNK_WEIGHTS // len(columns))
        for first in range(0, len(rows), step):
            few = range(rows.start + first, min(rows.start + first + step, rows.stop))
            raw = self.store.read(self.tensors[0], rows=few, columns=columns)
            with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
                values = raw.astype(np.float32) * scales[down[first : first + step]][:, across]
            result[first : first + step] = values
        return result

    def _scales(
        self, rows: range, columns: range
    ) -> tuple[NDArray[np.float32], NDArray[np.intp], NDArray[np.intp]]:
        """Scales of the affected blocks, and the index of each row's and column's block."""
        name = self.tensors[1]
        whole_rows, whole_columns = (
            -(-size // block) for size, block in zip(self.shape, self.block, strict=True)
        )
        found = self.store.read(name).reshape(whole_rows, whole_columns)
        down = np.arange(rows.start, rows.stop) // self.block[0]
        across = np.arange(columns.start, columns.stop) // self.block[1]
        return found.astype(np.float32), down, across


def block_of(config: Config, name: str) -> tuple[int, int]:
    """Two sizes in the configuration. Raises CheckpointError."""
    size = config.values.get(name)
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(each) is not int or not 0 < each <= MAX_SIZE for each in size)
    ):
        raise config.error(f"{name} must be two sizes, not {size!r:.80}")
    return size[0], size[1]


def _block(
    shape: tuple[int, ...], rows: int, columns: int, blocks: tuple[int, int] | None
) -> tuple[int, int] | None:
    if shape in ((), (1,)) or (shape == (1, 1) and blocks is None):
        return rows, columns
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    if blocks is not None and shape == (-(-rows // blocks[0]), -(-columns // blocks[1])):
        return blocks
    return None
