"""A tower or a part of one that is loaded on this peer: what it takes, reads and gives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import TowerProgram
from edge.concurrency.blocking import run_blocking
from edge.errors import ProtocolError
from edge.models.pictures import Tile, tile_of
from edge.models.towers.part import TowerPart
from edge.protocol import tower_frames
from edge.protocol.frame_codec import MOST_COPY_BYTES

Rows = NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class _Hidden:
    """The hidden state of a tile, as it arrives."""

    height: int
    width: int
    rows: Rows
    """[patches, hidden]."""
    count: int = 0
    """Rows that have come."""


class HostedTower:
    """A loaded part. Its calls raise ProtocolError for what such a part does not take."""

    def __init__(self, part: TowerPart, program: TowerProgram) -> None:
        self.part = part
        self._program = program
        self._turn = asyncio.Lock()
        self._no_rows = np.empty((0, part.output_size), np.float32)
        self._rows: Rows = self._no_rows
        """Rows of the tile that was read last, or its hidden state."""
        self._hidden: _Hidden | None = None
        """What has come for the next tile, of a part that is not the first."""

    @property
    def most_tile_bytes(self) -> int:
        """Bytes of the largest tile that it reads."""
        tower = self.part.tower
        return tower.max_patches * tower.patch_elements if self.part.is_first else 0

    @property
    def most_hidden_bytes(self) -> int:
        """Bytes of the most rows of a hidden state that it takes at once."""
        tower = self.part.tower
        tile_bytes = 4 * tower.max_patches * tower.encoder.hidden_size
        return 0 if self.part.is_first else min(tile_bytes, MOST_COPY_BYTES)

    async def put_hidden(self, call: tower_frames.PutHidden) -> None:
        async with self._turn:
            if call.first == 0:
                self._begin(call.height, call.width)
            hidden = self._hidden
            if (
                hidden is None
                or (hidden.height, hidden.width) != (call.height, call.width)
                or hidden.count != call.first
            ):
                raise ProtocolError(f"row {call.first} of a hidden state is not the next one")
            row_bytes, left = 4 * hidden.rows.shape[1], len(hidden.rows) - hidden.count
            count, rest = divmod(len(call.rows), row_bytes)
            if rest or not 0 < count <= left:
                raise ProtocolError(f"{len(call.rows)} bytes for {left} rows of {row_bytes} bytes")
            rows = np.frombuffer(call.rows, "<f4").reshape(count, -1)
            hidden.rows[hidden.count : hidden.count + count] = rows
            hidden.count += count

    def _begin(self, height: int, width: int) -> None:
        """Make room for the hidden state of a tile, once the sizes are checked."""
        if self.part.is_first:
            raise ProtocolError("the first part of a tower reads patches")
        try:
            self.part.tower.row_grid(height, width)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        self._hidden = None  # the ledger has room for one
        rows = np.empty((height * width, self.part.tower.encoder.hidden_size), np.float32)
        self._hidden = _Hidden(height=height, width=width, rows=rows)

    async def read(self, call: tower_frames.ReadTile) -> None:
        if self.part.is_first:
            tile = self._tile(call)
            async with self._turn:
                self._rows = self._no_rows  # the ledger has room for those of one tile
                self._rows = await run_blocking(lambda: self._program.read(tile))
            return
        async with self._turn:
            hidden, size = self._hidden, (call.height, call.width)
            if (
                hidden is None
                or len(call.patches)
                or size != (hidden.height, hidden.width)
                or hidden.count != len(hidden.rows)
            ):
                raise ProtocolError("the hidden state of this tile is not complete")
            self._hidden, self._rows = None, self._no_rows
            self._rows = await run_blocking(lambda: self._program.go_on(hidden.rows, *size))

    def _tile(self, call: tower_frames.ReadTile) -> Tile:
        tower = self.part.tower
        try:
            tile = tile_of(call.patches, call.height, call.width, tower.patch_elements)
            tower.check(tile)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return tile

    def rows(self, first: int, last: int) -> tower_frames.TileRows:
        """Rows [first, last) of the tile that was read last."""
        if not 0 <= first < last <= len(self._rows):
            raise ProtocolError(f"rows {first} to {last} of {len(self._rows)}")
        found = np.ascontiguousarray(self._rows[first:last], "<f4")
        return tower_frames.TileRows(rows=found.view(np.uint8).reshape(-1).data)

    async def aclose(self) -> None:
        async with self._turn:
            await run_blocking(self._program.close)
