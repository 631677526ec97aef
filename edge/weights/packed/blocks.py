"""Matrices in the blocks of GGUF file types, as `edge quantize` writes them.

    MODULE.weight_blocks.TYPE uint8 [rows, blocks, bytes of a row's block], such as TYPE Q4_K;
        a row's block as edge.kernels.matmul_blocks.reference has it
    MODULE.weight_shape int64 [2]: rows and columns; codes of columns past the end are ignored

config.json says {"quant_method": "edge-blocks", "version": that of the layout of a row's block}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_blocks.reference import (
    FORMS,
    TILES_VERSION,
    BlockParts,
    minima_of_runs,
    parts_of,
    scales_of_runs,
)
from edge.kernels.matmul_nbits.reference import pack
from edge.models.config import Config
from edge.weights.file_blocks import FileBlocks
from edge.weights.packed.block_matrix import BlockMatrix
from edge.weights.packed.compressed_config import OTHERS
from edge.weights.packed.matrix import Grid, PackedMatrix, Tensors

METHOD = "edge-blocks"
BLOCKS = ".weight_blocks."
_SHAPE = ".weight_shape"


def block_tensors(
    layer: str, kind: FileBlocks, shape: tuple[int, int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor: (type, shape)} in a safetensors file for a matrix of this kind."""
    blocks = -(-shape[1] // kind.form.block_size)
    return {
        f"{layer}{BLOCKS}{kind.type}": ("U8", (shape[0], blocks, kind.form.row_bytes)),
        f"{layer}{_SHAPE}": ("I64", (2,)),
    }


def block_arrays(
    layer: str, kind: FileBlocks, shape: tuple[int, int], blocks: NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """The values of these tensors. blocks: as `row_blocks`. Raises ValueError for other shapes."""
    (name, (_type, wanted)), (meant, _of_shape) = block_tensors(layer, kind, shape).items()
    if blocks.shape != wanted:
        raise ValueError(f"{layer} is {list(blocks.shape)}, not {list(wanted)} of {kind.words}")
    return {name: blocks, meant: np.array(shape, np.int64)}


def block_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config.json for a folder with such matrices."""
    kept = {key: value for key, value in values.items() if key not in OTHERS}
    return {**kept, "quantization_config": {"quant_method": METHOD, "version": TILES_VERSION}}


def find_blocks(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by the names of their weights. Raises CheckpointError for unsupported tensors."""
    if (version := config.integer("version")) != TILES_VERSION:
        raise CheckpointError(
            f"{tensors.source}: blocks in version {version} of their layout, and version "
            f"{TILES_VERSION} is read",
            remedy="read the folder by the version of Edge that wrote it, or write it again",
        )
    found: dict[str, PackedMatrix] = {}
    for name in tensors.store.names():
        layer, mark, type_name = name.rpartition(BLOCKS)
        if not mark:
            continue
        form = FORMS.get(type_name)
        if form is None or form.has_table:
            raise tensors.error(name, "is in blocks of a type that `edge quantize` does not write")
        shape = tensors.store.shape(name)
        meant = tensors.expect(f"{layer}{_SHAPE}", ("int64",), (2,), name)
        rows, columns = map(int, tensors.store.read(meant))
        blocks = -(-columns // form.block_size)
        if min(rows, columns) < 1 or shape != (rows, blocks, form.row_bytes):
            raise tensors.error(
                name, f"has shape {list(shape)}, which are no blocks of {rows} × {columns} weights"
            )
        tensors.expect(name, ("uint8",), shape, name)
        weight = tensors.alone(f"{layer}.weight", name)
        if weight in found:
            raise tensors.error(name, "is there twice: in blocks of another type")
        found[weight] = WrittenBlocks(
            store=tensors.store,
            shape=(rows, columns),
            tensors=(name, meant),
            bits=4 if form.bits <= 4 else 8,
            group=form.run,
            offsets=form.has_minimum,
            own=FileBlocks(type_name),
        )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenBlocks(BlockMatrix):
    """A matrix that is written in blocks, the last of which may be partial."""

    is_whole = True

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        form, blocks = self.own.form, self.own.blocks_of(columns)
        values = form.values(self.some_parts(rows, blocks).codes).reshape(len(rows), -1)
        values = values[:, columns.start - blocks.start * form.block_size :] + self._zero
        return pack(values.astype(np.uint8), self.bits)

    def grid(self, rows: range, groups: range) -> Grid:
        form = self.own.form
        blocks = self.own.blocks_of(range(groups.start * form.run, groups.stop * form.run))
        parts = self.some_parts(rows, blocks)
        first = groups.start - blocks.start * form.block_size // form.run

        def own(values: NDArray[np.float32]) -> NDArray[np.float32]:
            flat: NDArray[np.float32] = values.reshape(len(rows), -1)
            return flat[:, first : first + len(groups)]

        minima = minima_of_runs(parts)
        return Grid(
            scales=own(scales_of_runs(form, parts)),
            zeros=float(self._zero),
            biases=None if minima is None else own(minima),
        )

    @property
    def _zero(self) -> int:
        """The code of 0, or with minima that of the least weight."""
        return 0 if self.offsets else 1 << (self.bits - 1)

    def some_parts(self, rows: range, blocks: range) -> BlockParts:
        return parts_of(self.own.form, self.store.read(self.tensors[0], rows, blocks))
