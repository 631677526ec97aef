"""The parts of a GGUF file's blocks, for products that take them as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import BlockForm, BlockParts
from edge.offload import BlockType


def read_blocks(form: BlockForm, block: BlockType, raw: NDArray[np.uint8]) -> BlockParts:
    """The parts of raw blocks uint8 [rows, blocks, bytes of a block]."""
    assert block.coded is not None
    rows, blocks = raw.shape[:2]
    values = block.codes(raw).values.reshape(rows, blocks, form.block_size)

    def half(at: int) -> NDArray[np.float16]:
        two: NDArray[np.float16] = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
        return two[..., 0]

    at = block.coded.scale_at
    levels, least = block.coded.levels(raw) if block.coded.levels else (None, None)
    return BlockParts(
        codes=form.codes(values),
        scales=raw[..., at] if form.has_power else half(at),
        minima=half(at + 2) if form.has_minimum else None,
        levels=levels,
        least_levels=least,
    )
