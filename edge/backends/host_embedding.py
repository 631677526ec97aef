"""An embedding that stays on disk, of which the host looks up the rows that a step needs."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.base import Step
from edge.backends.shard_arrays import ShardArrays
from kernels.embedding.reference import embedding
from offload import numpy_dtype


class HostEmbedding:
    """What a shard that streams layers has instead of a table on its device. `close` it."""

    def __init__(self, arrays: ShardArrays) -> None:
        entry = arrays.entry("embedding")
        self._ids = arrays.layout.embedding
        self._dtype = numpy_dtype(entry.dtype)
        self._width = math.prod(entry.shape[1:])
        self._offset = entry.offset
        self._file = os.open(arrays.path, os.O_RDONLY)

    def look_up(self, step: Step, out: NDArray[np.float32]) -> None:
        """The rows [batch, tokens, hidden size] of the step's tokens; of other shards' tokens 0."""
        ids = np.asarray([token for entry in step.entries for token in entry.tokens])
        known = [int(token) for token in np.unique(ids) if token in self._ids]
        table = np.empty((max(1, len(known)), self._width), self._dtype)
        for row, token in enumerate(known):
            table[row] = self._read(token - self._ids.start)
        places = {token: row for row, token in enumerate(known)}
        rows = np.asarray([places.get(int(token), -1) for token in ids])
        out[...] = embedding(rows, table).reshape(out.shape)

    def close(self) -> None:
        os.close(self._file)

    def _read(self, row: int) -> NDArray[Any]:
        nbytes = self._width * self._dtype.itemsize
        content = os.pread(self._file, nbytes, self._offset + row * nbytes)
        return np.frombuffer(content, self._dtype)
