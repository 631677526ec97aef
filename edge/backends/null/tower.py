"""A stand-in for a tower: made-up rows that follow from the tile alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.models.pictures import Tile
from edge.models.towers.tower import Tower


class NullTower:
    """See TowerProgram. The same tile always gives the same rows, with values within ± 1."""

    def __init__(self, tower: Tower, *, weight_bytes: int) -> None:
        self._tower = tower
        self.weight_bytes = weight_bytes

    def read(self, tile: Tile) -> NDArray[np.float32]:
        tower = self._tower
        tower.check(tile)
        rows = tower.rows(tile.height, tile.width)
        random = np.random.default_rng(int.from_bytes(tile.digest[:8], "big"))
        shape = rows, tower.row_size
        return random.uniform(-1, 1, shape).astype(np.float32)

    def close(self) -> None:
        pass
