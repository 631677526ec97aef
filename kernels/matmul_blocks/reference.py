"""Blocks of GGUF files, laid out for the operator of `kernels/native`, and their arithmetic.

    y[m, n] = sum over k of x[m, k] * (scale[n, b] * (code[n, k] - zero) + minimum[n, b])

where b is the run of k. Types of one level have a float16 scale, and some a float16 minimum, for
each run of 32 columns. Types of two levels have float16 numbers for each block of 256 columns, and
each run has levels by which these are multiplied: scale = d * level, minimum = -dmin * level.

In a tile, sixteen rows lie side by side, so that each lane of a vector is a row. A row's block is:

    d, and dmin or the minimum                      float16
    levels of scales, then of minima                int8 (Q6_K) or uint8, one for each run
    and for each piece of 32 columns:
      four bits of each code                        byte k: column k low, column 16 + k high
      its fifth bit (4 bytes)                       byte c: bit i of column 4 i + c,
                                                    bit 4 + i of column 16 + 4 i + c
      or its fifth and sixth (8 bytes)              byte c: bits 2 i of column 4 i + c,
                                                    byte 4 + c: of column 16 + 4 i + c
      or all eight bits (32 bytes)

The tile has each of these for all rows before the next: float16 numbers and levels one by one,
codes in units of four bytes. Knows numpy arrays; knows nothing of files, graphs or how a model is
split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

TILE_ROWS = 16
PIECE = 32
"""Columns of a product whose inputs are rounded with one scale."""

_FOUR = np.arange(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """One type of blocks. number: the operator's. run: columns that share a scale."""

    name: str
    number: int
    bits: int
    run: int = 32
    has_levels: bool = False
    has_minimum: bool = False

    @property
    def block_size(self) -> int:
        """Columns of a block."""
        return 256 if self.has_levels else 32

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 0 if self.has_minimum else 1 << (self.bits - 1)

    @property
    def signed_levels(self) -> bool:
        return self.has_levels and not self.has_minimum

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """What a row's block consists of: how many units, and the bytes of each."""
        parts = 1 + self.has_minimum
        levels = self.block_size // self.run * parts if self.has_levels else 0
        codes = 8 if self.bits == 8 else self.bits
        return ((parts, 2), (levels, 1), (self.block_size // PIECE * codes, 4))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's block."""
        return sum(count * nbytes for count, nbytes in self.fields)

    @property
    def bytes_per_weight(self) -> float:
        return self.row_bytes / self.block_size


FORMS: Mapping[str, BlockForm] = {
    form.name: form
    for form in (
        BlockForm(name="Q4_0", number=0, bits=4),
        BlockForm(name="Q4_1", number=1, bits=4, has_minimum=True),
        BlockForm(name="Q5_0", number=2, bits=5),
        BlockForm(name="Q5_1", number=3, bits=5, has_minimum=True),
        BlockForm(name="Q8_0", number=4, bits=8),
        BlockForm(name="Q4_K", number=5, bits=4, has_levels=True, has_minimum=True),
        BlockForm(name="Q5_K", number=6, bits=5, has_levels=True, has_minimum=True),
        BlockForm(name="Q6_K", number=7, bits=6, run=16, has_levels=True),
    )
}
"""By the type's name in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockParts:
    """Rows of blocks, in parts.

    codes: uint8 [rows, blocks, block_size]. scales, and minima or None: float16 [rows, blocks].
    levels: None, or uint8 [rows, blocks, runs], int8 where they have signs. least_levels: those of
    minima.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None = None
    levels: NDArray[Any] | None = None
    least_levels: NDArray[np.uint8] | None = None


def row_blocks(form: BlockForm, parts: BlockParts) -> Bytes:
    """uint8 [rows, blocks, row_bytes]: a row's blocks as a tile has them."""
    rows, blocks = parts.scales.shape
    pieces = parts.codes.reshape(rows, blocks, -1, PIECE)
    halves = [parts.scales] if parts.minima is None else [parts.scales, parts.minima]
    levels = [each for each in (parts.levels, parts.least_levels) if each is not None]
    if form.bits == 8:
        packed = pieces
    else:
        low, up = pieces[..., :16], pieces[..., 16:]
        packed = np.bitwise_or(low & 15, up << np.uint8(4), dtype=np.uint8)
        if form.bits > 4:
            packed = np.concatenate([packed, _above(form, low, up)], axis=-1)
    return np.concatenate(
        [
            *(np.ascontiguousarray(each)[..., None].view(np.uint8) for each in halves),
            *(np.ascontiguousarray(each).view(np.uint8) for each in levels),
            packed.reshape(rows, blocks, -1),
        ],
        axis=-1,
    )


def _above(form: BlockForm, low: Bytes, up: Bytes) -> Bytes:
    """The bits of codes above four, [..., 4] or [..., 8]."""
    both = [(half >> np.uint8(4)).reshape(*half.shape[:-1], 4, 4) for half in (low, up)]
    width = np.uint8(form.bits - 4)
    shifts = (np.arange(4, dtype=np.uint8) * width)[:, None]
    lower, upper = (np.bitwise_or.reduce(each << shifts, axis=-2) for each in both)
    if form.bits == 5:
        found: Bytes = lower | upper << np.uint8(4)
        return found
    return np.concatenate([lower, upper], axis=-1)


def parts_of(form: BlockForm, rows: Bytes) -> BlockParts:
    """The parts of `row_blocks`."""
    at = 0

    def take(count: int, dtype: Any) -> NDArray[Any]:
        nonlocal at
        nbytes = count * np.dtype(dtype).itemsize
        found: NDArray[Any] = np.ascontiguousarray(rows[..., at : at + nbytes]).view(dtype)
        at += nbytes
        return found

    scales = take(1, np.float16)[..., 0]
    minima = take(1, np.float16)[..., 0] if form.has_minimum else None
    levels = least = None
    if form.has_levels:
        runs = form.block_size // form.run
        levels = take(runs, np.int8 if form.signed_levels else np.uint8)
        least = take(runs, np.uint8) if form.has_minimum else None
    pieces = rows[..., at:].reshape(*rows.shape[:2], form.block_size // PIECE, -1)
    if form.bits == 8:
        codes = pieces
    else:
        halves = [pieces[..., :16] & 15, pieces[..., :16] >> 4]
        if form.bits > 4:
            width = form.bits - 4
            above = [pieces[..., 16:20], pieces[..., -4:]]
            for number, bytes_above in enumerate(above):
                first = 4 * number if form.bits == 5 else 0
                shifts = (first + width * _FOUR).astype(np.uint8)[:, None]
                bits = bytes_above[..., None, :] >> shifts & np.uint8((1 << width) - 1)
                halves[number] = halves[number] | bits.reshape(halves[number].shape) << np.uint8(4)
        codes = np.concatenate(halves, axis=-1)
    return BlockParts(
        codes=codes.reshape(*rows.shape[:2], -1), scales=scales, minima=minima,
        levels=levels, least_levels=least,
    )  # fmt: skip


def tiles(form: BlockForm, rows: Bytes) -> Bytes:
    """uint8 [rows, blocks, row_bytes] to [tiles, blocks × a tile's bytes]; missing rows are 0."""
    count, blocks, nbytes = rows.shape
    missing = -count % TILE_ROWS
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, blocks, nbytes), np.uint8)])
    cut = rows.reshape(-1, TILE_ROWS, blocks, nbytes)
    turned = [
        field.swapaxes(1, 3).swapaxes(1, 2).reshape(len(cut), blocks, -1)
        for field in _fields(form, cut)
    ]
    return np.concatenate(turned, axis=-1).reshape(len(cut), -1)


def rows_of(form: BlockForm, found: Bytes) -> Bytes:
    """The inverse of `tiles`: uint8 [16 × tiles, blocks, row_bytes]."""
    cut = found.reshape(len(found), -1, TILE_ROWS * form.row_bytes)
    at, fields = 0, []
    for count, nbytes in form.fields:
        size = count * nbytes * TILE_ROWS
        field = cut[..., at : at + size].reshape(*cut.shape[:2], count, TILE_ROWS, nbytes)
        fields.append(
            field.swapaxes(1, 3).swapaxes(2, 3).reshape(len(cut), TILE_ROWS, cut.shape[1], -1)
        )
        at += size
    joined: Bytes = np.concatenate(fields, axis=-1)
    return joined.reshape(-1, cut.shape[1], form.row_bytes)


def _fields(form: BlockForm, cut: Bytes) -> Iterator[Bytes]:
    """[tiles, rows, blocks, bytes] as [tiles, rows, blocks, units, bytes of a unit]."""
    at = 0
    for count, nbytes in form.fields:
        size = count * nbytes
        yield cut[..., at : at + size].reshape(*cut.shape[:3], count, nbytes)
        at += size


def dequantize(form: BlockForm, rows: Bytes) -> NDArray[np.float32]:
    """Weights [rows, columns] of `row_blocks`. Bytes that no quantiser wrote may give NaN."""
    parts = parts_of(form, rows)
    count, blocks = parts.scales.shape
    scales = parts.scales.astype(np.float32)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        if parts.levels is not None:
            scales = scales * parts.levels.astype(np.float32)
        runs = parts.codes.reshape(count, blocks, -1, form.run)
        weights = (runs.astype(np.int16) - form.zero).astype(np.float32) * scales[..., None]
        if parts.minima is not None:
            minima = parts.minima.astype(np.float32)[..., None]
            if parts.least_levels is not None:
                minima = -minima * parts.least_levels.astype(np.float32)
            weights += minima[..., None]
    found: NDArray[np.float32] = weights.reshape(count, -1)
    return found


def rounded_inputs(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [..., columns] as the operator's fast products see it: codes −127…127 of each piece's own
    scale, its peak / 127."""
    missing = -x.shape[-1] % PIECE
    pieces = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]).reshape(*x.shape[:-1], -1, PIECE)
    peak = np.abs(pieces).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(peak > 0, np.rint(pieces * (np.float32(127) / peak)), 0)
    found: NDArray[np.float32] = (codes * (peak / np.float32(127))).astype(np.float32)
    return found.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
