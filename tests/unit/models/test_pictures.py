"""Tiles of pictures, and the ids of the rows that stand for tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge.models.pictures import MAX_PATCHES, PICTURE_IDS, Tile, is_row, row_ids, tile_of


def a_tile(height: int = 2, width: int = 3, *, seed: int = 0) -> Tile:
    patches = np.random.default_rng(seed).integers(0, 256, (height * width, 12), dtype=np.uint8)
    return Tile(patches=patches, height=height, width=width)


def test_rows_have_the_same_ids_wherever_a_tile_occurs() -> None:
    ids = row_ids(a_tile(), 100)
    assert ids == row_ids(a_tile(), 100)
    assert ids[:7] == row_ids(a_tile(), 7)
    assert len(set(ids)) == 100
    assert all(map(is_row, ids))
    assert max(ids) < 2 * PICTURE_IDS <= 1 << 53, "numbers that JSON has exactly"
    others = (a_tile(seed=1), a_tile(3, 2), Tile(patches=a_tile().patches, height=3, width=2))
    for ids_of_another in (*(row_ids(each, 100) for each in others), row_ids(a_tile(), 100, b"t")):
        assert not set(ids) & set(ids_of_another)


def test_a_tile_is_the_same_after_json() -> None:
    tile = a_tile()
    again = Tile.from_json(tile.to_json())
    assert (again.height, again.width, again.digest) == (2, 3, tile.digest)
    np.testing.assert_array_equal(again.patches, tile.patches)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"height": 0}, "height of a tile must be 1 to"),
        ({"height": True}, "height of a tile must be"),
        ({"width": MAX_PATCHES + 1}, "width of a tile must be 1 to"),
        ({"height": 1 << 13, "width": 1 << 13}, "are the most"),
        ({"elements": 13}, "bytes for 2 x 3 patches of 13"),
        ({"patches": 5}, "must be a text"),
        ({"patches": "\xe9"}, "cannot be read"),
        ({"more": 1}, "must be an object"),
    ],
)
def test_a_tile_that_cannot_be(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Tile.from_json(a_tile().to_json() | changed)


def test_no_more_is_unpacked_than_a_tile_has() -> None:
    bomb = Tile(patches=np.zeros((1, 1 << 14), np.uint8), height=1, width=1).to_json()
    with pytest.raises(ValueError, match="13 bytes for 1 x 1 patches of 12"):
        Tile.from_json(bomb | {"elements": 12})


def test_bytes_of_another_size_are_no_tile() -> None:
    with pytest.raises(ValueError, match="71 bytes for 2 x 3 patches of 12"):
        tile_of(bytes(71), 2, 3, 12)
