"""Bytes of a picture's file to tiles, by a confined process (`decode_process.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.host.confined_process import ConfinedProcess, Limits
from edge.models.pictures import Tile
from edge.pictures.tiling import Tiling

MOST_FILE_BYTES = 32 << 20
_PROGRAM = Path(__file__).with_name("decode_process.py")
_CPU_S = 20.0
"""Seconds of CPU for a picture; one of 50 million pixels takes 1.5 s on a laptop."""
_WALL_S = 120.0
_MEMORY_BYTES = 3 << 29
"""Four copies of the largest picture, of 4 bytes a pixel, and 0.5 GiB."""
_MOST_TILE_BYTES = 128 << 20
_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The tiles of one picture, and the grid that it was split into; 0 x 0: it was not split."""

    tiles: Sequence[Tile]
    rows: int = 0
    columns: int = 0


class PictureDecoder:
    """Decodes pictures and cuts them into tiles. Its process starts with the first picture;
    `close` ends it."""

    def __init__(self, tiling: Tiling, patch: int) -> None:
        """patch: pixels of a patch's side."""
        values = asdict(tiling)
        given = {each.name: values[each.name] for each in fields(tiling) if each.init}
        self._head = json.dumps({"tiling": type(tiling).__name__, **given}).encode() + b"\n"
        self._patch = patch
        self._process = ConfinedProcess(
            _PROGRAM,
            Limits(
                cpu_s=_CPU_S,
                wall_s=_WALL_S,
                memory_bytes=_MEMORY_BYTES,
                reply_bytes=_MOST_TILE_BYTES,
            ),
        )

    def picture(self, file: bytes) -> Picture:
        """The tiles of a picture in a file of any format that is read.

        Raises RequestError for a file that is none, and for a picture that the model cannot take.
        """
        try:
            head, tiles = self._cut(file)
            found = [self._tile(each) for each in tiles]
        except ValueError as error:  # of Tile
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"the picture does not suit the model: {error}", remedy="give another picture"
            ) from error
        return Picture(tiles=found, rows=head["rows"], columns=head["columns"])

    def pixels(self, file: bytes) -> NDArray[np.uint8]:
        """The pixels of the first tile: [height, width, 3]. Raises RequestError as `picture`."""
        return self._cut(file)[1][0]

    def _cut(self, file: bytes) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        """What the process says of the tiles, and the pixels of each: [height, width, 3]."""
        if len(file) > MOST_FILE_BYTES:
            raise RequestError(
                f"the picture's file has {len(file):,} bytes, and {MOST_FILE_BYTES:,} are the most "
                "that are read",
                remedy="make it smaller",
            )
        kind, content = self._process.ask(self._head, file)
        if kind != "cut":
            cause = content.decode("utf-8", "replace") or "its decoder ended"
            raise RequestError(
                f"the picture cannot be read: {cause}",
                remedy="give a whole PNG, JPEG, WebP, GIF or BMP, perhaps a smaller one",
            )
        end = content.index(b"\n")
        head, place = json.loads(content[:end]), end + 1
        tiles = []
        for width, height in head["sizes"]:
            size = width * height * _CHANNELS
            pixels = np.frombuffer(content, np.uint8, size, place)
            tiles.append(pixels.reshape(height, width, _CHANNELS))
            place += size
        return head, tiles

    def _tile(self, pixels: NDArray[np.uint8]) -> Tile:
        """pixels: [height, width, channels]."""
        side = self._patch
        height, width = (each // side for each in pixels.shape[:2])
        pixels = pixels[: height * side, : width * side]
        patches = pixels.reshape(height, side, width, side, _CHANNELS).transpose(0, 2, 4, 1, 3)
        return Tile(
            patches=np.ascontiguousarray(patches).reshape(height * width, -1),
            height=height,
            width=width,
        )

    def close(self) -> None:
        """End the process; another picture starts a new one."""
        self._process.close()
