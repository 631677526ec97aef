"""Detects writes to a file of weights while a model is computed from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edge.errors import CheckpointError
from edge.offload import PIECE_BYTES, TensorEntry, piece_digest
from edge.system.files import open_for_reading, read_at


class WatchedFile:
    """Watches some tensors of a file that was hashed before. Close it after use."""

    def __init__(self, path: Path, tensors: Sequence[TensorEntry]) -> None:
        self._path = path
        self._tensors = tensors
        self._file = open_for_reading(path)
        self._version = self._version_now()

    def check(self) -> None:
        """Raises CheckpointError if the tensors have changed.

        Takes a microsecond, unless the file was written to: then all tensors are read. Writes of
        equal bytes, as by a second coordinator, are harmless.
        """
        version = self._version_now()
        if version == self._version:
            return
        for tensor in self._tensors:
            for number, piece in enumerate(tensor.pieces):
                offset = tensor.offset + number * PIECE_BYTES
                if piece_digest(read_at(self._file, piece.nbytes, offset)) != piece.digest:
                    raise CheckpointError(
                        f"{self._path} was written to while a model was computed from it: it has "
                        f"other bytes at {offset:,}",
                        remedy="load the model again, which repairs it",
                    )
        self._version = version

    def close(self) -> None:
        """May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _version_now(self) -> tuple[int, ...]:
        """A version that changes with each write, but not when the file gets or loses a name."""
        status = os.fstat(self._file)
        return status.st_mtime_ns, status.st_size
