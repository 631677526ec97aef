"""Rows of pictures that have arrived for a shard, until the step that computes them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import StageCompute
from edge.errors import ProtocolError, RequestError
from edge.models.pictures import is_row
from edge.protocol.step import Step
from edge.transport.frame import Buffer


class WaitingRows:
    """The rows of a shard. Added by the thread of the loop, taken by the compute thread."""

    def __init__(
        self,
        hidden_size: int,
        *,
        most: int,
        is_awaited: bool,
        is_embedded: bool = True,
        picture_layers: int = 0,
        added: range = range(0),
    ) -> None:
        """most: rows that may wait at once. is_awaited: this shard gets them; is_embedded: it looks
        them up as embeddings. picture_layers: see `ModelSpec`; added: those of the shard."""
        self._hidden_size, self._most = hidden_size, most
        self._is_awaited, self._is_embedded = is_awaited, is_embedded
        self._row_size = (1 + picture_layers) * hidden_size
        self._added = slice(1 + added.start, 1 + added.stop)
        """Parts of a row."""
        self._adds = bool(added)
        self._mutex = threading.Lock()
        self._rows: dict[tuple[str, int], NDArray[np.float32]] = {}
        """By request and position."""

    def add(self, request: str, position: int, content: Buffer) -> None:
        """Keep float32 rows [tokens, (1 + picture_layers) · hidden] for tokens from `position` on.

        Raises ProtocolError for rows of another size, too many, or that are not finite.
        """
        row_bytes = 4 * self._row_size
        count, rest = divmod(len(content), row_bytes)
        if rest or not count or not self._is_awaited:
            raise ProtocolError(f"{len(content)} bytes are no rows of a picture for this shard")
        rows = np.frombuffer(content, "<f4").reshape(count, self._row_size)
        if not np.isfinite(rows).all():
            raise ProtocolError("rows of a picture with NaN or infinity")
        with self._mutex:
            if len(self._rows) + count > self._most:
                raise ProtocolError(f"more than {self._most} rows of pictures")
            self._rows |= {(request, position + number): row for number, row in enumerate(rows)}

    def take(self, step: Step, program: StageCompute) -> NDArray[np.float32] | None:
        """The rows of the step in the places of its tokens: its `receive_buffer`, otherwise zero.
        None: there are none to look up. What layers add goes to the step's `picture_rows`. Raises
        RequestError if a row has not come."""
        if not self._is_awaited or not any(
            is_row(id) for each in step.entries for id in each.tokens
        ):
            return None
        hidden = program.receive_buffer(step) if self._is_embedded else None
        if hidden is not None:
            hidden.fill(0)
        added = program.picture_rows(step) if self._adds else None
        size = self._hidden_size
        embedded = None if hidden is None else hidden.reshape(-1, size)
        behind = None if added is None else added.reshape(len(added), -1, size)
        number = -1
        with self._mutex:
            for entry in step.entries:
                for place, id in enumerate(entry.tokens):
                    number += 1
                    if is_row(id):
                        row = self._rows.pop((entry.request, entry.position + place), None)
                        if row is None:
                            raise RequestError("a row of a picture did not come before its step")
                        parts = row.reshape(-1, size)
                        if embedded is not None:
                            embedded[number] = parts[0]
                        if behind is not None:
                            behind[:, number] = parts[self._added]
        return hidden

    def forget(self, request: str) -> None:
        """Drop the rows of a request. Unknown ones are ignored."""
        with self._mutex:
            for key in [each for each in self._rows if each[0] == request]:
                del self._rows[key]
