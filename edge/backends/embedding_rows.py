"""An embedding that stays on disk: of each step the rows of its tokens are read."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.watched_file import WatchedFile
from edge.errors import CheckpointError
from edge.offload import StoreError, TensorEntry, numpy_dtype


class EmbeddingRows:
    """Rows by `read`, which mapping the file would bring in with all that lies around them.

    Pages that the system keeps of what was read are its own, and no part of this process.
    """

    def __init__(
        self, weights: ShardWeights, rows: range, hidden_size: int, *, scale: float
    ) -> None:
        """`rows` of the vocabulary are in the shard's file, read times `scale`; others are zero."""
        self._scale = np.float32(scale)
        self._rows = rows
        self._row = np.zeros(hidden_size, np.float32)
        self._entry: TensorEntry | None = None
        self._path = weights.path
        if rows:
            (self._entry,) = (each for each in weights.manifest.tensors if each.name == "embedding")
            self._row = np.zeros(hidden_size, numpy_dtype(self._entry.dtype))
        self._file = os.open(weights.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)  # no rows around those asked for
        tensors = (self._entry,) if self._entry else ()
        self._watched = WatchedFile(weights.path, tensors)

    def read_into(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64]) -> None:
        """hidden float32 [tokens, hidden size] of tokens int64 [tokens].

        Raises CheckpointError when the file is no longer what was written, StoreError when the disk
        fails.
        """
        known: dict[int, int] = {}
        for place, token in enumerate(tokens.tolist()):
            if token in known:
                hidden[place] = hidden[known[token]]
                continue
            known[token] = place
            if token not in self._rows or self._entry is None:
                hidden[place] = 0
                continue
            first = (token - self._rows.start) * self._row.nbytes
            self._read(self._row.view(np.uint8).data, self._entry.offset + first)
            hidden[place] = self._row
            hidden[place] *= self._scale
        self._watched.check()

    def _read(self, into: memoryview, offset: int) -> None:
        try:
            count = os.preadv(self._file, [into], offset)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error
        if count != len(into):
            raise CheckpointError(
                f"{self._path} ends within the embedding; it is not the file that was "
                "written: load the model again"
            )

    def close(self) -> None:
        """May be called again."""
        self._watched.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
