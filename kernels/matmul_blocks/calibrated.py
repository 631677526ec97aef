"""Rounding by inputs to the blocks of GGUF files; see `edge.kernels.feedback`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.kernels.feedback import Floats, Run, product, round_columns, runs_of, tiles_of
from edge.kernels.matmul_blocks.reference import BlockForm, BlockParts

_SPREADS = (-0.7, -0.4, -0.1, 0.2, 0.5, 0.8)
"""Tried ranges of the codes over a run's weights: the largest code, and as much more."""
_ROOM = np.float32(1.06)
"""The largest level is for a scale by so much above those of the weights: later ones are fitted to
weights that make up for errors."""
_MOST_LEVEL, _MOST_SIGNED_LEVEL = 255, 127
_LEAST_HALF = np.float32(2.0**-24)


def quantize_calibrated(
    form: BlockForm,
    weight: NDArray[np.generic],
    grams: Sequence[Floats],
    *,
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> BlockParts:
    """Rounds a float weight [rows, columns] to the codes that lose least for inputs like `grams`.

    grams: x^T x of the inputs summed over tokens, one [width, width] for each run of consecutive
    columns, which begins with a block; correlations between runs count as none. Columns past the
    end are 0. A block's float16 numbers come first, from all of its weights; each run of columns
    that shares a level then gets its level, its codes, and its level once more, by H.
    `on_rows` is told now and then how many more rows are rounded; what it raises ends the work.

    Raises ValueError for a type with a table, for other dtypes and shapes, for NaN or infinity, and
    where a gram is no x^T x. Weights that float16 scales cannot hold make some of these infinite.
    """
    if form.has_table:
        raise ValueError(f"the codes of {form.name} are no whole numbers")
    if weight.ndim != 2 or not weight.size or weight.dtype.kind not in "fV":
        raise ValueError(f"a weight is floats [rows, columns], not {weight.dtype} {weight.shape}")
    rows, columns = weight.shape
    blocks = -(-columns // form.block_size)
    shape, levels = (rows, blocks), (rows, blocks, form.block_size // form.run)
    parts = BlockParts(
        codes=np.zeros((rows, blocks, form.block_size), np.uint8),
        scales=np.zeros(shape, np.float16),
        minima=np.zeros(shape, np.float16) if form.has_minimum else None,
        levels=np.zeros(levels, np.int8 if form.signed_levels else np.uint8)
        if form.has_levels
        else None,
        least_levels=np.zeros(levels, np.uint8) if form.has_levels and form.has_minimum else None,
    )
    runs = runs_of(grams, columns, form.run, form.block_size)
    for some, run, errors in tiles_of(weight, runs):
        if not np.isfinite(errors).all():
            raise ValueError("the weight holds NaN or infinity, which no code stands for")
        with np.errstate(over="ignore", invalid="ignore"):  # infinite scales, see above
            for first in range(0, len(errors), form.block_size):
                _round_block(form, run, first, errors, parts, some)
        if run is runs[-1]:
            on_rows(len(weight[some]))
    return parts


def _round_block(
    form: BlockForm, run: Run, first: int, errors: Floats, parts: BlockParts, rows: slice
) -> None:
    """errors [width, tile rows]: earlier columns' errors, then weights, of which a block's become
    errors."""
    index = (run.start + first) // form.block_size
    count = len(parts.scales[rows])
    stop = first + form.block_size
    units = least_units = None
    if form.has_levels:
        expected = errors[first:stop] + product(run.feedback[:first, first:stop], errors[:first])
        fitted = [
            _fit(form, expected[at : at + form.run], run.importance[first + at :][: form.run])
            for at in range(0, form.block_size, form.run)
        ]
        most = _MOST_LEVEL if form.has_minimum else _MOST_SIGNED_LEVEL
        units = _unit(np.max([np.abs(scale) for scale, _least in fitted], axis=0), most)
        parts.scales[rows, index] = units[:count]
        if parts.minima is not None:
            least_units = _unit(np.max([-least for _scale, least in fitted], axis=0), _MOST_LEVEL)
            parts.minima[rows, index] = least_units[:count]
    for number, at in enumerate(range(first, stop, form.run)):
        columns = slice(at, at + form.run)
        wanted = errors[columns] + product(run.feedback[:at, columns], errors[:at])
        scale, least = _fit(form, wanted, run.importance[columns])
        scale, least, level, least_level = _stored(form, scale, least, units, least_units)
        codes, scratch = np.empty_like(wanted), np.empty_like(wanted)
        low, high = -float(form.zero), float((1 << form.bits) - 1 - form.zero)
        round_columns(
            run.feedback[columns, columns], (wanted - least) * _inverse(scale), low, high, codes,
            scratch,
        )  # fmt: skip
        scale, least = _refitted(form, run.root[columns, columns], wanted, codes, scale, least)
        scale, least, level, least_level = _stored(form, scale, least, units, least_units)
        errors[columns] -= codes * scale + least
        codes += np.float32(form.zero)
        own = slice(number * form.run, (number + 1) * form.run)
        parts.codes[rows, index, own] = codes[:, :count].T
        if parts.levels is not None:
            parts.levels[rows, index, number] = level[:count]
            if parts.least_levels is not None:
                parts.least_levels[rows, index, number] = least_level[:count]
        else:
            parts.scales[rows, index] = scale[:count]
            if parts.minima is not None:
                parts.minima[rows, index] = least[:count]


def _inverse(values: Floats) -> Floats:
    return np.divide(1, values, out=np.zeros_like(values), where=values != 0)


def _unit(largest: Floats, most: int) -> Floats:
    """The float16 number of a block's levels up to `most`, as float32."""
    halves = _half(np.maximum(largest * (_ROOM / most), _LEAST_HALF))
    return np.where(largest > 0, halves, 0)


def _stored(
    form: BlockForm, scale: Floats, least: Floats, units: Floats | None, least_units: Floats | None
) -> tuple[Floats, Floats, Floats, Floats]:
    """Scale and least weight as they can be stored, and their levels."""
    if units is None:
        return _half(scale), _half(least), scale, least
    most = _MOST_LEVEL if form.has_minimum else _MOST_SIGNED_LEVEL
    lowest = 0 if form.has_minimum else -most
    level = np.clip(np.rint(scale * _inverse(units)), lowest, most)
    if least_units is None:
        return units * level, np.zeros_like(scale), level, level
    least_level = np.clip(np.rint(-least * _inverse(least_units)), 0, _MOST_LEVEL)
    return units * level, -least_units * least_level, level, least_level


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _fit(form: BlockForm, weights: Floats, importance: Floats) -> tuple[Floats, Floats]:
    """Scale and least weight of a run's weights [run, rows], with the least squared error of all
    spreads, where a column's counts `importance` times. Least is 0 in types without a minimum."""
    if form.has_minimum:
        return _fit_range(form, weights, importance / importance.mean())
    return _fit_scale(form, weights, importance / importance.mean())


def _fit_range(form: BlockForm, x: Floats, by: Floats) -> tuple[Floats, Floats]:
    top = float((1 << form.bits) - 1)
    lowest, highest = x.min(axis=0), x.max(axis=0)
    if form.has_levels:
        lowest = np.minimum(lowest, 0)
    count, total, weighted = by.sum(), by @ x, by[:, None] * x
    inverse = _inverse(highest - lowest)
    best = np.full_like(lowest, np.inf)
    scales, leasts = np.zeros_like(lowest), lowest.copy()
    codes = np.empty_like(x)
    for spread in _SPREADS:
        np.subtract(x, lowest, out=codes)
        np.multiply(codes, inverse * np.float32(top + spread), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, 0, top, out=codes)
        q, qx = by @ codes, np.einsum("kr,kr->r", codes, weighted)
        qq = np.einsum("kr,kr,k->r", codes, codes, by)
        both = _inverse(count * qq - q * q)
        scale, least = (count * qx - total * q) * both, (qq * total - q * qx) * both
        if form.has_levels:
            is_off = least > 0
            scale = np.where(is_off, qx * _inverse(qq), scale)
            least[is_off] = 0
        error = scale * (scale * qq + 2 * (least * q - qx)) + least * (count * least - 2 * total)
        better = (both > 0) & (error < best)
        for kept, found in ((best, error), (scales, scale), (leasts, least)):
            np.copyto(kept, found, where=better)
    return scales, leasts


def _fit_scale(form: BlockForm, x: Floats, by: Floats) -> tuple[Floats, Floats]:
    zero = float(form.zero)
    lowest, highest = x.min(axis=0), x.max(axis=0)
    peak = np.where(-lowest > highest, lowest, highest)
    inverse, weighted = _inverse(peak), by[:, None] * x
    best, scales = np.zeros_like(peak), np.zeros_like(peak)
    codes = np.empty_like(x)
    for spread in _SPREADS:
        np.multiply(x, inverse * np.float32(-(zero + spread)), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -zero, zero - 1, out=codes)
        qx = np.einsum("kr,kr->r", codes, weighted)
        scale = qx * _inverse(np.einsum("kr,kr,k->r", codes, codes, by))
        gain = qx * scale
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scales, scale, where=better)
    return scales, np.zeros_like(scales)


def _refitted(
    form: BlockForm, root: Floats, wanted: Floats, codes: Floats, scale: Floats, least: Floats
) -> tuple[Floats, Floats]:
    """Scale and least weight with which these codes lose least in the columns of their own run."""
    target, given = product(root, wanted), product(root, codes)
    square = np.einsum("kr,kr->r", given, given)
    mixed = np.einsum("kr,kr->r", given, target)
    alone = np.divide(mixed, square, out=scale.copy(), where=square > 0)
    if not form.has_minimum:
        return alone, least
    ones = root.sum(axis=0)
    all_square, across, share = ones @ ones, ones @ given, ones @ target
    both = square * all_square - across * across
    is_clear = both > 1e-6 * square * all_square
    inverse = np.divide(1, both, out=np.zeros_like(both), where=is_clear)
    new_scale = np.where(is_clear, (mixed * all_square - share * across) * inverse, scale)
    new_least = np.where(is_clear, (share * square - mixed * across) * inverse, least)
    if form.has_levels:
        is_off = new_least > 0
        new_scale = np.where(is_off, alone, new_scale)
        new_least = np.where(is_off, 0, new_least)
    return new_scale, new_least
