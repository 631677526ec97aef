"""An embedding that stays on disk, of which the host looks up the rows that a step needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.backends.base import Step
from edge.backends.shard_arrays import ShardArrays
from kernels.embedding.reference import embedding


class HostEmbedding:
    """What a shard that streams layers has instead of a table on its device."""

    def __init__(self, arrays: ShardArrays) -> None:
        self._arrays = arrays
        self._rows = arrays.layout.embedding

    def look_up(self, step: Step, out: NDArray[np.float32]) -> None:
        """The rows [batch, tokens, hidden size] of the step's tokens; of other shards' tokens 0."""
        ids = np.asarray([token for entry in step.entries for token in entry.tokens])
        known = [token for token in np.unique(ids) if token in self._rows]
        if not known:
            out[...] = 0
            return
        table = self._arrays.read("embedding", [int(t) - self._rows.start for t in known])
        places = {int(token): row for row, token in enumerate(known)}
        rows = np.asarray([places.get(int(token), -1) for token in ids])
        out[...] = embedding(rows, table).reshape(out.shape)
