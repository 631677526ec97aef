"""Embedding tables on disk, of which each step reads the rows of its tokens."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.backends.watched_file import WatchedFile
from edge.errors import CheckpointError
from edge.models.pictures import is_row
from edge.offload import StoreError, TensorEntry, numpy_dtype
from edge.system.files import expect_random_reads, open_for_reading, read_into
from edge.weights.layout import token_table


class EmbeddingRows:
    """Reads rows of embedding tables from a shard's file.

    The file is read and not mapped, because a mapping would also load neighbouring rows, and its
    pages would count as this process's memory.
    """

    def __init__(
        self, weights: ShardWeights, rows: range, hidden_size: int, *, scale: float
    ) -> None:
        """rows: the part of the vocabulary in the file; other rows are zero. scale: a factor for
        the embedding.

        The file may also have learned positions, which are added, and tables of per-layer token
        inputs.
        """
        self._scale = np.float32(scale)
        self._rows = rows
        self._path = weights.path
        entries = {each.name: each for each in weights.manifest.tensors}
        self._tokens = _Table.of(entries["embedding"], hidden_size) if rows else None
        found = entries.get("positions")
        self._positions = None if found is None else _Table.of(found, hidden_size)
        names = itertools.takewhile(entries.__contains__, map(token_table, itertools.count()))
        self._layers = [_Table.of(entries[name], entries[name].shape[1]) for name in names]
        self._file = open_for_reading(weights.path)
        expect_random_reads(self._file)
        tables = (self._tokens, self._positions, *self._layers)
        self._watched = WatchedFile(
            weights.path, [table.entry for table in tables if table is not None]
        )

    def read_into(
        self,
        hidden: NDArray[np.float32],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64] | None = None,
        *,
        has_pictures: bool = False,
    ) -> None:
        """Fill hidden float32 [tokens, hidden size] with the embedding of tokens int64 [tokens].
        positions: needed by models with learned positions. has_pictures: it has the rows of
        pictures, which are else zero.

        Raises CheckpointError if the file has changed, StoreError if the disk fails.
        """
        known: dict[int, int] = {}
        for place, token in enumerate(tokens.tolist()):
            if token in known:
                hidden[place] = hidden[known[token]]
                continue
            known[token] = place
            if self._tokens is None or token not in self._rows:
                if not (has_pictures and is_row(token)):
                    hidden[place] = 0
                continue
            hidden[place] = self._read(self._tokens, token - self._rows.start)
            hidden[place] *= self._scale
        if self._positions is not None:
            assert positions is not None
            for place, position in enumerate(positions.tolist()):
                hidden[place] += self._read(self._positions, position)
        self._watched.check()

    def read_layers_into(
        self, rows: NDArray[np.float32], first: int, tokens: NDArray[np.int64]
    ) -> None:
        """Fill rows float32 [layers, any number, size], from `first` on, with the per-layer inputs
        of tokens int64 [tokens]. Raises as `read_into`."""
        layers, _, size = rows.shape
        at_once = self._layers[0].entry.shape[0]
        known: dict[int, int] = {}
        for place, token in enumerate(tokens.tolist(), start=first):
            if token in known:
                rows[:, place] = rows[:, known[token]]
                continue
            known[token] = place
            table, number = divmod(0 if is_row(token) else token, at_once)
            rows[:, place] = self._read(self._layers[table], number).reshape(layers, size)
        self._watched.check()

    def _read(self, table: _Table, number: int) -> NDArray[np.generic]:
        into = table.row.view(np.uint8).data
        try:
            count = read_into(self._file, into, table.entry.offset + number * len(into))
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error
        if count != len(into):
            raise CheckpointError(
                f"{self._path} ends within the {table.entry.name}",
                remedy="the file was changed; load the model again",
            )
        return table.row

    def close(self) -> None:
        """May be called again."""
        self._watched.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True, slots=True)
class _Table:
    """A table in the file, and a buffer for one row."""

    entry: TensorEntry
    row: NDArray[np.generic]

    @classmethod
    def of(cls, entry: TensorEntry, columns: int) -> _Table:
        return cls(entry, np.zeros(columns, numpy_dtype(entry.dtype)))
