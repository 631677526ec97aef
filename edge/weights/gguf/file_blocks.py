"""The parts of a GGUF file's blocks, for products that take them as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import BlockForm, BlockParts
from edge.offload import BlockType


def read_blocks(form: BlockForm, block: BlockType, raw: NDArray[np.uint8]) -> BlockParts:
    """The parts of raw blocks uint8 [rows, blocks, bytes of a block]. Several of them may be one
    block of the form."""
    assert block.coded is not None
    rows, blocks = len(raw), raw.shape[1] * block.block_size // form.block_size
    values = block.codes(raw).values.reshape(rows, blocks, form.block_size)

    def half(at: int) -> NDArray[np.float16]:
        two: NDArray[np.float16] = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
        return two[..., 0]

    at = block.coded.scale_at
    levels, least = block.coded.levels(raw) if block.coded.levels else (None, None)
    if form.has_float_levels:
        assert levels is not None
        scales, levels = np.ones((rows, blocks), np.float32), levels.reshape(rows, blocks, -1)
    else:
        scales = raw[..., at] if form.has_power else half(at)
    return BlockParts(
        codes=form.codes(values),
        scales=scales,
        minima=half(at + 2) if form.has_minimum else None,
        levels=levels,
        least_levels=least,
    )
