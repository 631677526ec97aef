"""A stand-in for a part of a tower: made-up rows that follow from the tile alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.models.pictures import Tile
from edge.models.towers.part import TowerPart

_SEED_BYTES = 8


class NullTower:
    """See TowerProgram. The same tile always gives the same rows, with values within ± 1, however
    the tower is cut: its hidden state is the seed of the rows."""

    def __init__(self, part: TowerPart, *, weight_bytes: int) -> None:
        self._part = part
        self.weight_bytes = weight_bytes

    def read(self, tile: Tile) -> NDArray[np.float32]:
        self._part.tower.check(tile)
        return self._made(tile.digest[:_SEED_BYTES], tile.height, tile.width)

    def go_on(self, hidden: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
        seed = hidden.reshape(-1)[:_SEED_BYTES].astype(np.uint8).tobytes()
        return self._made(seed, height, width)

    def _made(self, seed: bytes, height: int, width: int) -> NDArray[np.float32]:
        part = self._part
        shape = part.output_rows(height, width), part.output_size
        if not part.is_last:
            hidden = np.zeros(shape, np.float32)
            hidden.reshape(-1)[:_SEED_BYTES] = np.frombuffer(seed, np.uint8)
            return hidden
        random = np.random.default_rng(int.from_bytes(seed, "big"))
        return random.uniform(-1, 1, shape).astype(np.float32)

    def close(self) -> None:
        pass
