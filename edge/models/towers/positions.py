"""Where the patches of a tile stand: the order in which a tower reads them, and their rotations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.models.towers.tower import Turns

Array = NDArray[np.float32]


def block_order(side: int, height: int, width: int) -> NDArray[np.int64]:
    """The patches of a tile block by block, [height · width]; rows in a block, and blocks, as they
    stand in the tile."""
    numbers = np.arange(height * width).reshape(height // side, side, width // side, side)
    return np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(-1)


def windows(
    side: int, window: int, height: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Windows of window · window blocks, in a tile in the order of `block_order`.

    Returns the patches of each window [windows, most], of which the first are meant; their counts
    [windows]; and the place of each patch in the flat first array [height · width].
    """
    high, wide, size = height // side, width // side, side**2
    y, x = np.indices((high, wide)).reshape(2, -1) // window
    number = (y * -(-wide // window) + x).repeat(size)
    counts = np.bincount(number)
    most = int(counts.max())
    patches = np.argsort(number, kind="stable")
    within = np.arange(len(patches)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.repeat(np.arange(len(counts)), counts) * most + within
    members = np.zeros(len(counts) * most, np.int64)
    members[places] = patches
    back = np.empty(len(patches), np.int64)
    back[patches] = places
    return members.reshape(-1, most), counts.astype(np.int32), back


def turn_tables(turns: Turns, height: int, width: int) -> tuple[Array, Array]:
    """(cos, sin), each [height · width, pairs], row by row. Angles are float32 products, because
    reference models form them so."""
    y, x = np.indices((height, width), np.float32).reshape(2, -1, 1)
    of_rows, of_columns = (
        axis * np.asarray(angles, np.float32)
        for axis, angles in ((y, turns.rows), (x, turns.columns))
    )
    both = (of_columns, of_rows) if turns.is_by_axis else (of_rows, of_columns)
    angles = np.concatenate(both, axis=1)
    return np.cos(angles), np.sin(angles)


def axial_frequencies(theta: float, head_size: int) -> tuple[float, ...]:
    """The angles per step of pairs of which half turn on each axis, alike on both."""
    half = head_size // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    return tuple(map(float, np.float32(1.0) / np.power(np.float32(theta), exponents)))
