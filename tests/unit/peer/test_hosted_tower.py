"""A part of a tower takes the hidden state of one tile at a time, and no other bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import numpy as np
import pytest

from edge.backends.null.tower import NullTower
from edge.errors import ProtocolError
from edge.models.towers.part import TowerPart
from edge.peer.hosted_tower import HostedTower
from edge.protocol.tower_frames import PutHidden, ReadTile
from tests.unit.models.test_towers import made

TOWER = made("mistral3")
HEIGHT, WIDTH, HIDDEN = 2, 4, TOWER.encoder.hidden_size
PATCHES = HEIGHT * WIDTH


def hosted(layers: range) -> HostedTower:
    part = TowerPart(tower=TOWER, layers=layers)
    return HostedTower(part, NullTower(part, weight_bytes=5))


def done(call: Awaitable[None]) -> None:
    async def wait() -> None:
        await call

    asyncio.run(wait())


def put(tower: HostedTower, first: int, rows: bytes, height: int = HEIGHT) -> None:
    call = PutHidden(session="s", height=height, width=WIDTH, first=first, rows=rows)
    done(tower.put_hidden(call))


def read(tower: HostedTower, patches: bytes = b"", height: int = HEIGHT) -> None:
    done(tower.read(ReadTile(session="s", height=height, width=WIDTH, patches=patches)))


def test_parts_give_the_rows_of_the_whole() -> None:
    tile = np.arange(PATCHES * TOWER.patch_elements, dtype=np.uint8).tobytes()
    whole, first, last = hosted(range(3)), hosted(range(2)), hosted(range(2, 3))
    read(whole, tile)
    read(first, tile)
    for start, stop in ((0, 3), (3, 4), (4, PATCHES)):
        put(last, start, bytes(first.rows(start, stop).rows))
    read(last)
    count = TOWER.rows(HEIGHT, WIDTH)
    assert bytes(last.rows(0, count).rows) == bytes(whole.rows(0, count).rows)


def test_rows_come_in_order_and_all_of_them() -> None:
    tower, row = hosted(range(2, 3)), bytes(4 * HIDDEN)
    for first, rows in ((1, row), (0, b""), (0, row[1:]), (0, row * (PATCHES + 1))):
        with pytest.raises(ProtocolError):
            put(tower, first, rows)
    put(tower, 0, row * 3)
    for first, rows in ((2, row), (4, row), (3, row * PATCHES)):
        with pytest.raises(ProtocolError):
            put(tower, first, rows)
    with pytest.raises(ProtocolError, match="not the next one"):
        put(tower, 3, row, height=2 * HEIGHT)
    with pytest.raises(ProtocolError, match="not complete"):
        read(tower)
    put(tower, 0, row)  # another tile
    put(tower, 1, row * (PATCHES - 1))
    for patches, height in ((b"\0", HEIGHT), (b"", 2 * HEIGHT)):
        with pytest.raises(ProtocolError, match="not complete"):
            read(tower, patches, height)
    read(tower)
    with pytest.raises(ProtocolError, match="not complete"):
        read(tower)


def test_a_tile_that_was_not_agreed_takes_no_memory() -> None:
    tower = hosted(range(2, 3))
    for height in (1, 2 * TOWER.max_patches):
        with pytest.raises(ProtocolError, match="patches"):
            put(tower, 0, bytes(4 * HIDDEN), height)
    with pytest.raises(ProtocolError, match="reads patches"):
        put(hosted(range(2)), 0, bytes(4 * HIDDEN))
    assert tower.most_tile_bytes == 0
    assert hosted(range(2)).most_hidden_bytes == 0
    assert 0 < tower.most_hidden_bytes <= 1 << 20
