"""Rounding that knows its inputs: what one column's rounding loses, later columns make up for.

Knows a weight and the products of its inputs; how those are measured is the caller's affair.

GPTQ (Frantar et al., 2022) lowers the squared error of the outputs, tr(E H E^T), where E is the
error of the weight [rows, columns] and H = x^T x. It is computed as LDLQ (Chee et al., 2023), which
chooses the same codes and needs no inverse: with H = R R^T, R upper triangular, the loss is
|E R|^2, and its part of column k is the square of

    R[k, k] * (E[:, k] + sum over i < k of E[:, i] * R[i, k] / R[k, k]).

So column k does best to round its weight plus that sum. From block to block the same holds with
blocks of R; these sums are what the columns of a block come to if none of them is rounded.

Columns are taken as they come. The largest first (act-order) wins nothing where blocks have scales
of their own: int4 left KL 0.0535 with "output" and "down" of SmolLM2-135M so sorted and 0.0562 with
all matrices, against 0.0522 on the same statistics (1,149 positions); and such matrices are harder
to cut between devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix, room_for
from edge.kernels.matmul_nbits.rounding import RoundingTile

# Added to H's diagonal, as a part of its mean. SmolLM2-135M, runs of 512 columns, 4 bits for most:
# 0.05 / 0.1 / 0.2 / 0.4 leave KL 0.0514 / 0.0516 / 0.0521 / 0.0523 (plain rounding: 0.0909), and
# the first three 0.446 / 0.447 / 0.452 of plain rounding's output error on another text.
_DAMPING = 0.1
# A sum in float32 may have eigenvalues below 0 by more than the damping: tried with this much more.
_MORE_DAMPING = (1.0, 10.0, 100.0)

# A block of 64 columns in the most rows is 128 KiB, of which a few stay in a 1 MiB L2 cache. Tiles
# for fewer rows are lower, but have a power of 2, which products are made in parts of.
_TILE_ROWS, _LEAST_TILE_ROWS = 512, 64

# OpenBLAS gives a product of more multiplications than this to threads of its own. On a busy host
# these wait for each other: a matrix that takes 1 s took 6 to 20.
_ONE_THREAD = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Columns whose correlations are known, padded to whole blocks: width columns from `start`.

    Of H in units of its mean diagonal, damped, float32. root: R [width, width]. feedback: share of
    column i's error that column k takes, [width, width]: R[i, k] / R[k, k] within a block, from
    earlier blocks the same with blocks of R, otherwise 0. importance: the diagonal [width].
    """

    start: int
    root: NDArray[np.float32]
    feedback: NDArray[np.float32]
    importance: NDArray[np.float32]


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
    _round_tiles(weight, _runs(grams, result), result, on_rows)
    return result


def _runs(grams: Sequence[NDArray[np.float32]], result: QuantizedMatrix) -> list[_Run]:
    for gram in grams:
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
            raise ValueError(f"a gram is [width, width] of a run, not {list(gram.shape)}")
        if not np.isfinite(gram).all():
            raise ValueError("a gram holds NaN or infinity, which no inputs have")
    widths = [len(gram) for gram in grams]
    if sum(widths) != result.columns:
        raise ValueError(f"grams of {sum(widths)} columns for a weight of {result.columns}")
    if any(width % result.block_size for width in widths[:-1]):
        raise ValueError(f"runs of {widths} columns cut blocks of {result.block_size}")
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [_run(gram, start, result.block_size) for gram, start in zip(grams, starts, strict=True)]


def _run(gram: NDArray[np.float32], start: int, block_size: int) -> _Run:
    hessian = gram.astype(np.float64)
    dead = np.diagonal(hessian) <= 0
    hessian[dead] = 0
    hessian[:, dead] = 0
    mean = np.diagonal(hessian).mean()
    hessian = hessian / mean if mean > 0 else np.eye(len(gram))
    width = -(-len(gram) // block_size) * block_size
    padded = np.eye(width)
    padded[: len(gram), : len(gram)] = hessian
    root, importance = _root(padded)
    feedback = np.zeros_like(root)
    for first in range(0, width, block_size):
        block = slice(first, first + block_size)
        own = root[block, block]
        feedback[block, block] = np.triu(own / np.diagonal(own), 1)
        feedback[:first, block] = np.linalg.solve(own.T, root[:first, block].T).T
    return _Run(
        start=start,
        root=root.astype(np.float32),
        feedback=feedback.astype(np.float32),
        importance=importance.astype(np.float32),
    )


def _root(
    hessian: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The upper triangular R of the damped Hessian R R^T, and the diagonal of that."""
    for more in (1.0, *_MORE_DAMPING):
        damped = hessian + np.eye(len(hessian)) * (_DAMPING * more)
        try:  # backwards, a lower triangular matrix is an upper one
            lower = np.asarray(np.linalg.cholesky(damped[::-1, ::-1]), np.float64)
        except np.linalg.LinAlgError:
            continue
        return lower[::-1, ::-1], np.diagonal(damped)
    raise ValueError("a gram is far from positive semidefinite, so it is no x^T x")


def _round_tiles(
    weight: NDArray[np.generic],
    runs: Sequence[_Run],
    result: QuantizedMatrix,
    on_rows: Callable[[int], None],
) -> None:
    """Rounds `_TILE_ROWS` rows after the other into `result`."""
    height = min(_TILE_ROWS, max(_LEAST_TILE_ROWS, 1 << (len(weight) - 1).bit_length()))
    tile = RoundingTile(
        result.bits,
        result.block_size,
        height,
        np.dtype(np.float32),
        has_zeros=result.zero_points is not None,
    )
    errors = np.zeros((max(len(run.root) for run in runs), height), np.float32)
    for start in range(0, len(weight), height):
        rows = slice(start, start + height)
        for run in runs:
            part = weight[rows, run.start : run.start + len(run.root)]
            errors[part.shape[1] :] = 0
            errors[:, len(part) :] = 0
            with np.errstate(over="ignore"):  # float64 past float32 becomes infinity, refused
                errors[: part.shape[1], : len(part)] = part.astype(np.float32).T
            _round_run(tile, run, errors[: len(run.root)], result, rows)
        on_rows(len(weight[rows]))


def _round_run(
    tile: RoundingTile, run: _Run, errors: NDArray[np.float32], result: QuantizedMatrix, rows: slice
) -> None:
    """errors [width, tile rows]: the weights; block after block becomes its own error."""
    for first in range(0, len(errors), result.block_size):
        block = slice(first, first + result.block_size)
        weights = errors[block]
        wanted = weights + _product(run.feedback[:first, block], errors[:first])
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
    least, most = -zeros, np.float32((1 << tile.bits) - 1) - zeros
    errors = np.multiply(wanted, inverse, out=tile.weights)
    targets = errors.copy()
    for column, (error, target, code) in enumerate(zip(errors, targets, tile.rounded, strict=True)):
        np.rint(target, out=code)
        np.maximum(code, least, out=code)
        np.minimum(code, most, out=code)
        np.subtract(error, code, out=error)
        later = slice(column + 1, None)
        np.multiply(feedback[column, later, None], error, out=tile.products[later])
        np.add(targets[later], tile.products[later], out=targets[later])


def _refitted(
    rounded: NDArray[np.float32],
    root: NDArray[np.float32],
    wanted: NDArray[np.float32],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The scales with which these codes lose least in the columns of their own block."""
    target, given = _product(root, wanted), _product(root, rounded)
    mixed = np.add.reduce(target * given, axis=0)
    square = np.add.reduce(given * given, axis=0)
    return np.divide(mixed, square, out=scales, where=square > 0)


def _product(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """left^T right, of [depth, height] and [depth, width], in pieces that BLAS does not divide."""
    (_, height), width = left.shape, right.shape[1]
    deep = min(height, 64)
    wide = min(width, _ONE_THREAD // (height * deep))
    pieces: NDArray[np.float32] = np.matmul(
        left.reshape(-1, 1, deep, height).swapaxes(2, 3),
        right.reshape(-1, deep, width // wide, wide).swapaxes(1, 2),
    )
    total: NDArray[np.float32] = np.add.reduce(pieces, axis=0)
    return total.swapaxes(0, 1).reshape(height, width)
