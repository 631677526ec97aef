"""The parts of a GGUF file's blocks, for products that take them as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import BlockForm, BlockParts
from edge.offload import BlockType, scales_and_minima
from edge.weights.weight_limits import largest_of


def read_blocks(form: BlockForm, block: BlockType, raw: NDArray[np.uint8]) -> BlockParts:
    """The parts of raw blocks uint8 [rows, blocks, bytes of a block]."""
    rows, blocks = raw.shape[:2]
    values = block.codes(raw).values.reshape(rows, blocks, form.block_size)
    codes = (values.astype(np.int16) + form.zero).astype(np.uint8)

    def half(at: int) -> NDArray[np.float16]:
        two: NDArray[np.float16] = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
        return two[..., 0]

    if form.name == "Q6_K":
        levels = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
        return BlockParts(codes=codes, scales=half(208), levels=levels)
    minima = half(2) if form.has_minimum else None
    if not form.has_levels:
        return BlockParts(codes=codes, scales=half(0), minima=minima)
    scales, least = scales_and_minima(raw[..., 4:16])
    return BlockParts(codes=codes, scales=half(0), minima=minima, levels=scales, least_levels=least)


def largest_weight(form: BlockForm, parts: BlockParts) -> float:
    """No weight is larger than this; NaN or infinite if some are."""
    scales = parts.scales.astype(np.float32)
    largest = largest_of(scales) * max(form.zero, (1 << form.bits) - 1 - form.zero)
    if parts.levels is not None:
        largest *= float(np.abs(parts.levels.astype(np.int16)).max(initial=0))
    if parts.minima is not None:
        least = largest_of(parts.minima.astype(np.float32))
        if parts.least_levels is not None:
            least *= float(parts.least_levels.max(initial=0))
        largest += least
    return largest
