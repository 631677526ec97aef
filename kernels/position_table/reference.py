"""Learned positions of patches: y[i] = x[i] + sum over t of share[t, i] · table[place[t, i]].

"buckets": a table [side · side] has one row for each cell of the tile; tiles of fewer patches take
the cells at equal fractions. "bilinear": the same table between its cells, corners on corners.
"axes": a table [2 · side] has a row for each column of the tile, then one for each row.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Table = Literal["buckets", "bilinear", "axes"]
TABLES: tuple[Table, ...] = get_args(Table)


def taps(table: Table, side: int, height: int, width: int) -> tuple[NDArray[np.int64], Array]:
    """(places, shares), each [taps, height · width], of the patches of a tile, row by row."""
    if table == "axes":
        y, x = np.indices((height, width)).reshape(2, -1)
        return np.stack([x, side + y]), np.ones((2, height * width), np.float32)
    find = _buckets if table == "buckets" else _between
    (rows, of_rows), (columns, of_columns) = find(height, side), find(width, side)
    places = rows[:, None, :, None] * side + columns[None, :, None, :]
    shares = of_rows[:, None, :, None] * of_columns[None, :, None, :]
    both = len(rows) * len(columns), height * width
    return places.reshape(both), shares.reshape(both).astype(np.float32)


def _buckets(count: int, side: int) -> tuple[NDArray[np.int64], Array]:
    """The cell of each of `count` patches [1, count], and its share. In float32, because reference
    models compare so."""
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    fractions = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
    cells = np.searchsorted(bounds, np.minimum(fractions, np.float32(1 - 1e-6)), side="right")
    return cells[None].astype(np.int64), np.ones((1, count), np.float32)


def _between(count: int, side: int) -> tuple[NDArray[np.int64], Array]:
    """The two cells around each of `count` patches, and their shares, each [2, count]."""
    place = (
        np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    )
    lower = np.floor(place)
    cells = np.minimum(np.stack([lower, lower + 1]).astype(np.int64), side - 1)
    return cells, np.stack([1 - (place - lower), place - lower])


def position_table(x: Array, places: NDArray[np.int64], shares: Array, table: Array) -> Array:
    """x [batch, patches, n]; places, shares [taps, patches]; table [rows, n] → like x."""
    found = np.einsum("tp,tpn->pn", shares.astype(np.float64), table[places])
    result: Array = (x + found).astype(np.float32)
    return result
