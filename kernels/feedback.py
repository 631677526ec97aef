"""Rounding that knows its inputs: what one column's rounding loses, later columns make up for.

Knows products of inputs, and errors; how a block's codes stand for weights is its format's affair.

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

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

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
class Run:
    """Columns whose correlations are known, padded to whole blocks: width columns from `start`.

    Of H in units of its mean diagonal, damped, float32. root: R [width, width]. feedback: share of
    column i's error that column k takes, [width, width]: R[i, k] / R[k, k] within a block, from
    earlier blocks the same with blocks of R, otherwise 0. importance: the diagonal [width].
    """

    start: int
    root: Floats
    feedback: Floats
    importance: Floats


def runs_of(grams: Sequence[Floats], columns: int, block: int, padded: int = 0) -> list[Run]:
    """The runs of a matrix's columns, for blocks of `block` columns that share a scale.

    padded: columns to whose multiples runs are padded, a multiple of `block`; 0: of `block`.
    Raises ValueError where a gram is no x^T x, and where runs cut blocks.
    """
    padded = padded or block
    for gram in grams:
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
            raise ValueError(f"a gram is [width, width] of a run, not {list(gram.shape)}")
        if not np.isfinite(gram).all():
            raise ValueError("a gram holds NaN or infinity, which no inputs have")
    widths = [len(gram) for gram in grams]
    if sum(widths) != columns:
        raise ValueError(f"grams of {sum(widths)} columns for a weight of {columns}")
    if any(width % padded for width in widths[:-1]):
        raise ValueError(f"runs of {widths} columns cut blocks of {padded}")
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [_run(gram, at, block, padded) for gram, at in zip(grams, starts, strict=True)]


def _run(gram: Floats, start: int, block: int, padded: int) -> Run:
    hessian = gram.astype(np.float64)
    dead = np.diagonal(hessian) <= 0
    hessian[dead] = 0
    hessian[:, dead] = 0
    mean = np.diagonal(hessian).mean()
    hessian = hessian / mean if mean > 0 else np.eye(len(gram))
    width = -(-len(gram) // padded) * padded
    whole = np.eye(width)
    whole[: len(gram), : len(gram)] = hessian
    root, importance = _root(whole)
    feedback = np.zeros_like(root)
    for first in range(0, width, block):
        columns = slice(first, first + block)
        own = root[columns, columns]
        feedback[columns, columns] = np.triu(own / np.diagonal(own), 1)
        feedback[:first, columns] = np.linalg.solve(own.T, root[:first, columns].T).T
    return Run(
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


def tile_rows(rows: int) -> int:
    """Rows that are rounded at once."""
    return min(_TILE_ROWS, max(_LEAST_TILE_ROWS, 1 << (rows - 1).bit_length()))


def tiles_of(
    weight: NDArray[np.generic], runs: Sequence[Run]
) -> Iterator[tuple[slice, Run, Floats]]:
    """Rows after rows, and of these run after run: the rows, the run, and weights [width, rows at
    once] with zeros past the end, which may be written to until the next."""
    height = tile_rows(len(weight))
    room = np.zeros((max(len(run.root) for run in runs), height), np.float32)
    for start in range(0, len(weight), height):
        rows = slice(start, start + height)
        for run in runs:
            part = weight[rows, run.start : run.start + len(run.root)]
            room[part.shape[1] :] = 0
            room[:, len(part) :] = 0
            with np.errstate(over="ignore"):  # float64 past float32 becomes infinity, refused
                room[: part.shape[1], : len(part)] = part.astype(np.float32).T
            yield rows, run, room[: len(run.root)]


def round_columns(
    feedback: Floats,
    targets: Floats,
    least: Floats | float,
    most: Floats | float,
    codes: Floats,
    scratch: Floats,
) -> None:
    """Leaves in `codes` [columns, rows] whole numbers from `least` to `most` for the targets, one
    column after the other; targets are overwritten. feedback: of these columns."""
    errors = targets.copy()
    for column, (error, target, code) in enumerate(zip(errors, targets, codes, strict=True)):
        np.rint(target, out=code)
        np.maximum(code, least, out=code)
        np.minimum(code, most, out=code)
        np.subtract(error, code, out=error)
        later = slice(column + 1, None)
        np.multiply(feedback[column, later, None], error, out=scratch[later])
        np.add(targets[later], scratch[later], out=targets[later])


def product(left: Floats, right: Floats) -> Floats:
    """left^T right, of [depth, height] and [depth, width], in pieces that BLAS does not divide."""
    (_, height), width = left.shape, right.shape[1]
    deep = min(height, 64)
    wide = min(width, _ONE_THREAD // (height * deep))
    pieces: Floats = np.matmul(
        left.reshape(-1, 1, deep, height).swapaxes(2, 3),
        right.reshape(-1, deep, width // wide, wide).swapaxes(1, 2),
    )
    total: Floats = np.add.reduce(pieces, axis=0)
    return total.swapaxes(0, 1).reshape(height, width)
