"""A `QuantizedMatrix` as GPU kernels read it: whole words of codes, scales next to each other.

Words are uint32 [rows, words], the codes of one output in the order of its inputs, the first in the
lowest bits: one 16-byte load brings 32 codes of 4 bits and all that is needed to place them. That
is what the file holds, seen as words, so nothing is copied. Scales and zero points are turned to
[blocks, rows]: a tile of outputs then reads them next to each other. Many rows and few read the
same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix

BITS_PER_WORD = 32

_HALF_ROUNDING = 2.0**-11
"""Relative; scales that lose more than this as float16 are refused."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuMatrix:
    """words uint32 [rows, words]; scales float32 or float16, zero_points uint8 [blocks, rows]."""

    words: NDArray[np.uint32]
    scales: NDArray[np.floating]
    zero_points: NDArray[np.uint8] | None
    bits: int
    block_size: int
    columns: int


def gpu_layout(
    matrix: QuantizedMatrix,
    *,
    zero_points: NDArray[np.uint8] | None = None,
    half_scales: bool = False,
) -> GpuMatrix:
    """zero_points uint8 [rows, blocks]. half_scales makes them float16: with blocks of 32 that
    takes half a bit from each weight.

    Raises ValueError for zero points of another shape, and for scales that float16 cannot hold.
    """
    rows, blocks = matrix.scales.shape
    if zero_points is not None and (
        zero_points.shape != (rows, blocks) or zero_points.dtype != np.uint8
    ):
        raise ValueError(
            f"zero points are {zero_points.dtype} {list(zero_points.shape)}, not uint8 "
            f"{[rows, blocks]}"
        )
    scales = _halved(matrix.scales) if half_scales else matrix.scales
    codes = np.ascontiguousarray(matrix.codes).reshape(rows, -1)
    return GpuMatrix(
        words=codes.view("<u4"),
        scales=np.ascontiguousarray(scales.T),
        zero_points=None if zero_points is None else np.ascontiguousarray(zero_points.T),
        bits=matrix.bits,
        block_size=matrix.block_size,
        columns=matrix.columns,
    )


def _halved(scales: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halved = scales.astype(np.float16)
    lost = np.abs(halved.astype(np.float32) - scales)
    if not (lost <= _HALF_ROUNDING * np.abs(scales)).all():
        raise ValueError("some scales are too large or too small for float16; keep them float32")
    return halved
