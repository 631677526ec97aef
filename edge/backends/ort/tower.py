"""A tower as one ONNX Runtime session."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.tower import DEEP, ROWS, tower_feeds
from edge.backends.watched_file import WatchedFile
from edge.models.pictures import Tile
from edge.models.towers.tower import Tower


class OrtTower:
    """See TowerProgram. `read` raises CheckpointError if the file was changed since loading."""

    def __init__(self, tower: Tower, session: ort.InferenceSession, weights: ShardWeights) -> None:
        self._tower = tower
        self._session: ort.InferenceSession | None = session
        self._file = WatchedFile(weights.path, weights.manifest.tensors)
        self.weight_bytes = weights.manifest.total_bytes

    def read(self, tile: Tile) -> NDArray[np.float32]:
        assert self._session is not None, "not closed"
        feeds = tower_feeds(self._tower, tile)
        self._file.check()
        names = [ROWS, *map(DEEP.format, range(self._tower.deep_layers))]
        found: list[NDArray[np.float32]] = self._session.run(names, feeds)
        rows: NDArray[np.float32] = np.concatenate(found, axis=-1)[0]
        return rows

    def close(self) -> None:
        self._session = None
        self._file.close()
