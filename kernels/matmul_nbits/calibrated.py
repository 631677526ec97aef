"""Rounding by inputs to blocks that share a scale; see `edge.kernels.feedback`."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.kernels.feedback import Run, product, round_columns, runs_of, tile_rows, tiles_of
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, room_for
from edge.kernels.matmul_nbits.rounding import RoundingTile


def quantize_calibrated(
    weight: NDArray[np.generic],
    grams: Sequence[NDArray[np.float32]],
    *,
    bits: int,
    block_size: int,
    zero_points: bool = False,
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> QuantizedMatrix:
    """Rounds a float weight [rows, columns] to the codes that lose least for inputs like `grams`.

    grams: x^T x of the inputs summed over tokens, one [width, width] for each run of consecutive
    columns; correlations between runs count as none. A run begins at a multiple of block_size.
    Their unit does not matter. Inputs that were always zero neither give nor take corrections; a
    run without any others is rounded as if all its inputs were alike.

    Each block's scale (and zero point) is searched as `quantize` does, on weights already corrected
    and with errors weighted by the inputs' squares; its codes are the nearest to that scale, and
    the scale is then fitted to them once more, by H: 2 % less output error.
    `on_rows` is told now and then how many more rows are rounded; what it raises ends the work.

    A row's result depends on that row alone, but for the order in which BLAS sums, which may be
    another in another column of a product. In one thread: a second one won nothing, as the work is
    many small steps that hold the interpreter's lock.

    Raises ValueError for other dtypes and shapes, for NaN or infinity, and where a gram is no
    x^T x.
    """
    result = room_for(weight, bits=bits, block_size=block_size, zero_points=zero_points)
    runs = runs_of(grams, result.columns, result.block_size)
    tile = RoundingTile(
        result.bits,
        result.block_size,
        tile_rows(len(weight)),
        np.dtype(np.float32),
        has_zeros=result.zero_points is not None,
    )
    for rows, run, errors in tiles_of(weight, runs):
        _round_run(tile, run, errors, result, rows)
        if run is runs[-1]:
            on_rows(len(weight[rows]))
    return result


def _round_run(
    tile: RoundingTile, run: Run, errors: NDArray[np.float32], result: QuantizedMatrix, rows: slice
) -> None:
    """errors [width, tile rows]: the weights; block after block becomes its own error."""
    for first in range(0, len(errors), result.block_size):
        block = slice(first, first + result.block_size)
        weights = errors[block]
        wanted = weights + product(run.feedback[:first, block], errors[:first])
        scales, zeros = tile.fit(wanted, run.importance[block])
        _round_block(tile, run.feedback[block, block], wanted, scales, zeros)
        scales = _refitted(tile.rounded, run.root[block, block], wanted, scales)
        np.multiply(tile.rounded, scales, out=tile.products)
        weights -= tile.products
        tile.rounded += zeros
        index = (run.start + first) // result.block_size
        codes = result.codes[rows, index]
        tile.write_codes(codes)
        result.scales[rows, index] = scales[: len(codes)]
        if result.zero_points is not None:
            result.zero_points[rows, index] = zeros[: len(codes)]


def _round_block(
    tile: RoundingTile,
    feedback: NDArray[np.float32],
    wanted: NDArray[np.float32],
    scales: NDArray[np.float32],
    zeros: NDArray[np.float32],
) -> None:
    """Leaves codes less their zero points in `tile.rounded`; all in units of the scale."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    most = np.float32((1 << tile.bits) - 1) - zeros
    np.multiply(wanted, inverse, out=tile.weights)
    round_columns(feedback, tile.weights, -zeros, most, tile.rounded, tile.products)


def _refitted(
    rounded: NDArray[np.float32],
    root: NDArray[np.float32],
    wanted: NDArray[np.float32],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The scales with which these codes lose least in the columns of their own block."""
    target, given = product(root, wanted), product(root, rounded)
    mixed = np.add.reduce(target * given, axis=0)
    square = np.add.reduce(given * given, axis=0)
    return np.divide(mixed, square, out=scales, where=square > 0)
