"""Experts in 4-bit floats (E2M1), in blocks of 32 that share a power of 2, as in gpt-oss.

    NAME_blocks uint8 [experts, outputs, blocks, 16]: two codes a byte, the low one first
    NAME_scales uint8 [experts, outputs, blocks]: the power of 2, 127 more than it is
    NAME is gate_up_proj, whose outputs are gate and up in turn, or down_proj

Twice the value of a code is a whole number up to 12, so codes of 8 bits hold it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import BlockParts
from edge.models.config import Config
from edge.models.experts import MAX_EXPERTS
from edge.models.parts import MAX_SIZE
from edge.weights.file_blocks import FileBlocks
from edge.weights.packed.block_matrix import E2M1_CODES, E2M1_ZERO, BlockMatrix, halves_of
from edge.weights.packed.matrix import Grid, PackedMatrix, Tensors

BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK, _BLOCK_BYTES = 32, 16
_POWERS = np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)
"""Half of the scales, because the codes are doubled."""
_KIND = FileBlocks("MXFP4")
"""The blocks of GGUF files of this name, whose codes are in another order."""
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def find_mxfp4(_config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by the names that weights have if each expert has its own tensors.

    Raises CheckpointError for unsupported or contradictory tensors.
    """
    found: dict[str, PackedMatrix] = {}
    for whole, matrices in _MATRICES.items():
        for layer in tensors.names(f".{whole}{BLOCKS}"):
            name = f"{layer}.{whole}"
            blocks, scales = f"{name}{BLOCKS}", f"{name}{_SCALES}"
            shape = tensors.store.shape(blocks)
            if (
                len(shape) != 4
                or shape[3] != _BLOCK_BYTES
                or shape[1] % len(matrices)
                or not all(0 < each <= MAX_SIZE for each in shape)
                or not (shape[0] <= MAX_EXPERTS and shape[2] * _BLOCK <= MAX_SIZE)
            ):
                raise tensors.error(blocks, f"has shape {list(shape)}, which is no experts' blocks")
            tensors.expect(blocks, ("uint8",), shape, blocks)
            tensors.expect(scales, ("uint8",), shape[:3], blocks)
            for number in range(shape[0]):
                for place, matrix in enumerate(matrices):
                    weight = f"{layer}.{number}.{matrix}.weight"
                    found[tensors.alone(weight, blocks)] = Mxfp4Matrix(
                        store=tensors.store,
                        shape=(shape[1] // len(matrices), shape[2] * _BLOCK),
                        tensors=(blocks, scales),
                        bits=8,
                        group=_BLOCK,
                        own=_KIND,
                        number=number,
                        rows=range(place, shape[1], len(matrices)),
                    )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Mxfp4Matrix(BlockMatrix):
    """A matrix of expert `number`, of these `rows` of its tensors."""

    number: int
    rows: range

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        first, stop = columns.start // _BLOCK, -(-columns.stop // _BLOCK)
        packed = self._read(self.tensors[0], rows)[:, first:stop]
        halves = halves_of(packed).reshape(len(rows), -1)
        start = first * _BLOCK
        return E2M1_CODES[halves[:, columns.start - start : columns.stop - start]]

    def some_parts(self, rows: range, blocks: range) -> BlockParts:
        packed, powers = (
            self._read(each, rows)[:, blocks.start : blocks.stop] for each in self.tensors
        )
        return BlockParts(codes=halves_of(packed), scales=powers)

    def grid(self, rows: range, groups: range) -> Grid:
        powers = self._read(self.tensors[1], rows)[:, groups.start : groups.stop]
        return Grid(scales=_POWERS[powers], zeros=float(E2M1_ZERO))

    def _read(self, name: str, rows: range) -> NDArray[Any]:
        """These rows of the expert's tensor."""
        kept = self.rows[rows.start : rows.stop]
        run = range(kept.start, max(kept.start, kept.stop - kept.step + 1))
        found: NDArray[Any]
        (found,) = self.store.read(name, range(self.number, self.number + 1), run)
        return found[:: kept.step]
