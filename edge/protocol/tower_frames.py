"""Frames of a tower, which reads pictures: it is loaded, reads tiles, hands out their rows, and is
freed."""

from __future__ import annotations

from dataclasses import dataclass

from edge.models.pictures import MAX_TILE_BYTES
from edge.models.towers.part import TowerPart
from edge.protocol.frame_codec import LARGE_HEADER, MOST_COPY_BYTES, SMALL, Call, Done, Raw
from edge.transport.frame import FrameLimits
from edge.weights.formats import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTower(Call[Done]):
    """Reserve memory and load a tower, or a part of one, whose weights are sealed on the peer."""

    kind, limit_s = "open_tower", 3600.0
    limits = LARGE_HEADER
    session: str
    part: TowerPart
    weight_format: WeightFormat
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutHidden(Call[Done]):
    """Rows of the hidden state of a tile, for a part of a tower that is not the first: those from
    `first` on. They come in order; with row 0 another tile begins."""

    kind, limit_s = "put_hidden", 60.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    height: int
    """Patches."""
    width: int
    first: int
    rows: Raw
    """Float32 [rows, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTile(Call[Done]):
    """Read a tile, and keep its rows until they are taken or the next tile is read. A part that is
    not the first has no patches, but all of the hidden state."""

    kind, limit_s = "read_tile", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_TILE_BYTES)
    session: str
    height: int
    """Patches."""
    width: int
    patches: Raw
    """See `Tile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRows:
    """Rows of a tile, float32 [rows, hidden]; of a part that is not the last, its hidden state
    [patches, hidden]."""

    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRows(Call[TileRows]):
    """Rows [first, last) of the tile that was read last."""

    kind, limit_s = "take_rows", 60.0
    session: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTower(Call[Done]):
    """Free the tower's memory."""

    kind, limit_s = "close_tower", 60.0
    session: str
