"""Pictures as models read them: tiles of patches, and the ids of the rows that stand for tokens."""

from __future__ import annotations

import base64
import hashlib
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import shown

PICTURE_IDS = 1 << 52
"""Ids from here on are rows of pictures, below it tokens."""

MAX_PATCHES = 1 << 14
"""Most patches of a tile: 2048 x 2048 pixels in patches of 16."""
MAX_PATCH_ELEMENTS = 1 << 14
"""Most values of a patch: 73 x 73 pixels of three colours."""
MOST_TILES = 1 << 10
"""Most tiles of a prompt."""
MAX_TILE_BYTES = 1 << 25
"""Most bytes of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """What a tower reads at once: a picture, or a part of one. ValueError for impossible sizes."""

    patches: NDArray[np.uint8]
    """[height · width, elements], by rows of patches. A patch's elements are by channel, row and
    column of pixels."""
    height: int
    """Patches."""
    width: int
    digest: bytes = field(init=False, compare=False)
    """A hash of patches and sizes."""

    def __post_init__(self) -> None:
        if self.patches.ndim != 2:
            raise ValueError(f"patches {self.patches.shape} of a tile")
        check_tile_sizes(self.height, self.width, self.patches.shape[1])
        if self.patches.dtype != np.uint8 or self.patches.shape[0] != self.height * self.width:
            raise ValueError(f"patches {self.patches.shape} of a tile {self.height} x {self.width}")
        digest = hashlib.blake2b(f"{self.height} {self.width} ".encode(), digest_size=32)
        digest.update(self._bytes)
        object.__setattr__(self, "digest", digest.digest())

    @property
    def _bytes(self) -> memoryview:
        return np.ascontiguousarray(self.patches).reshape(-1).data

    def to_json(self) -> dict[str, Any]:
        packed = zlib.compress(self._bytes, level=1)
        return {
            "height": self.height,
            "width": self.width,
            "elements": self.patches.shape[1],
            "patches": base64.b85encode(packed).decode(),
        }

    @classmethod
    def from_json(cls, value: object) -> Tile:
        """Raises ValueError for a value that `to_json` cannot make."""
        if not isinstance(value, dict) or set(value) != {"height", "width", "elements", "patches"}:
            raise ValueError(f"a tile must be an object with its sizes and patches: {shown(value)}")
        height, width, elements = value["height"], value["width"], value["elements"]
        check_tile_sizes(height, width, elements)
        if not isinstance(value["patches"], str):
            raise ValueError("patches of a tile must be a text")
        num_bytes = height * width * elements
        try:
            packed = base64.b85decode(value["patches"])
            patches = zlib.decompressobj().decompress(packed, num_bytes + 1)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"patches of a tile cannot be read: {error}") from None
        return tile_of(patches, height, width, elements)


def check_tile_sizes(height: object, width: object, elements: object) -> None:
    """Raises ValueError for sizes that no tile has."""
    sizes = 1
    for name, value, most in (
        ("height", height, MAX_PATCHES),
        ("width", width, MAX_PATCHES),
        ("elements", elements, MAX_PATCH_ELEMENTS),
    ):
        if type(value) is not int or not 0 < value <= most:
            raise ValueError(f"{name} of a tile must be 1 to {most}, not {shown(value)}")
        sizes *= value
    if sizes > MAX_TILE_BYTES:
        raise ValueError(f"a tile of {sizes} bytes; {MAX_TILE_BYTES} are the most")


def tile_of(
    patches: bytes | bytearray | memoryview, height: int, width: int, elements: int
) -> Tile:
    """A tile of these bytes. Raises ValueError if they are of another size."""
    if len(patches) != height * width * elements:
        raise ValueError(f"{len(patches)} bytes for {height} x {width} patches of {elements}")
    array = np.frombuffer(patches, np.uint8).reshape(height * width, elements)
    return Tile(patches=array, height=height, width=width)


def row_ids(tile: Tile, rows: int, tower: bytes = b"") -> tuple[int, ...]:
    """The ids of a tile's rows, as a tower of this digest reads it. They are the same wherever the
    tile occurs, so prefixes with it are found again, and those of two tiles are all different."""
    if not 0 < rows <= MAX_PATCHES:
        raise ValueError(f"a tile of {rows} rows")
    digest = hashlib.shake_256(tile.digest + tower).digest(8 * rows)
    numbers = np.frombuffer(digest, "<u8") % PICTURE_IDS + PICTURE_IDS
    return tuple(numbers.tolist())


def is_row(id: int) -> bool:
    """Whether a token's id stands for a row of a picture."""
    return id >= PICTURE_IDS
