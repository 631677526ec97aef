"""A part of a tower as one ONNX Runtime session."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.tower import DEEP, HIDDEN_OUT, ROWS, part_feeds, tower_feeds
from edge.backends.watched_file import WatchedFile
from edge.models.pictures import Tile
from edge.models.towers.part import TowerPart


class OrtTower:
    """See TowerProgram. `read` and `go_on` raise CheckpointError if the file was changed since
    loading."""

    def __init__(
        self, part: TowerPart, session: ort.InferenceSession, weights: ShardWeights
    ) -> None:
        self._part = part
        self._session: ort.InferenceSession | None = session
        self._file = WatchedFile(weights.path, weights.manifest.tensors)
        self.weight_bytes = weights.manifest.total_bytes

    def read(self, tile: Tile) -> NDArray[np.float32]:
        return self._run(tower_feeds(self._part, tile))

    def go_on(self, hidden: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
        return self._run(part_feeds(self._part, hidden, height, width))

    def _run(self, feeds: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        assert self._session is not None, "not closed"
        self._file.check()
        names = [ROWS, *map(DEEP.format, range(self._part.tower.deep_layers))]
        names = names if self._part.is_last else [HIDDEN_OUT]
        found: list[NDArray[np.float32]] = self._session.run(names, feeds)
        rows: NDArray[np.float32] = np.concatenate(found, axis=-1)[0]
        return rows

    def close(self) -> None:
        self._session = None
        self._file.close()
