"""Towers of one coordinator on this peer: loaded, asked and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights, TowerProgram
from edge.backends.registry import open_tower
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import PeerError, ProtocolError
from edge.memory.tower_memory import tower_use
from edge.models.pictures import Tile, tile_of
from edge.models.towers.part import TowerPart
from edge.models.towers.tower import Tower
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import messages
from edge.protocol.frame_codec import Call
from edge.transport import Member
from edge.weights.shard_tensors import check_tensors
from edge.weights.tower import tower_layout


@dataclass(slots=True, kw_only=True)
class _Tower:
    program: TowerProgram
    part: TowerPart
    turn: asyncio.Lock
    rows: NDArray[np.float32]
    """Rows of the tile that was read last, or its hidden state."""
    hidden: _Hidden | None = None
    """What has come for the next tile, of a part that is not the first."""


@dataclass(slots=True, kw_only=True)
class _Hidden:
    """The hidden state of a tile, as it arrives."""

    height: int
    width: int
    rows: NDArray[np.float32]
    """[patches, hidden]."""
    count: int = 0
    """Rows that have come."""


class CoordinatorTowers:
    """The towers of one coordinator. Close with `aclose`."""

    def __init__(
        self, resources: PeerResources, user: Member | None, owner: object, weights: WeightUploads
    ) -> None:
        """Resources are counted for `user` and `owner`. weights: uploads that towers load."""
        self._peer, self._user, self._weights = resources, user, weights
        self._owner = owner
        self._shards = QuotaShare(resources.shards, owner)
        self._towers: dict[str, _Tower] = {}
        self._opening: set[str] = set()

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            messages.OpenTower: self._open,
            messages.PutHidden: self._put_hidden,
            messages.ReadTile: self._read,
            messages.TakeRows: self._take_rows,
            messages.CloseTower: self._close,
        }

    @property
    def most_tile_bytes(self) -> int:
        """Bytes of the largest tile that one of them reads."""
        parts = [each.part for each in self._towers.values() if each.part.is_first]
        towers = [part.tower for part in parts]
        return max((each.max_patches * each.patch_elements for each in towers), default=0)

    @property
    def most_hidden_bytes(self) -> int:
        """Bytes of the most rows of a hidden state that one of them gets at once."""
        parts = [each.part for each in self._towers.values() if not each.part.is_first]
        tile = max((hidden_bytes(each.tower) for each in parts), default=0)
        return min(tile, messages.MOST_COPY_BYTES)

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            for session in tuple(self._towers):
                stack.push_async_callback(self._end, session)

    async def _open(self, call: messages.OpenTower) -> messages.Done:
        if self._peer.leaving.is_set():
            raise PeerError(self._peer.settings.name, "its user has stopped it")
        name = _use_name(call.session)
        if call.session in self._towers or call.session in self._opening:
            raise ProtocolError("this session is open already")
        cached = self._weights.sealed(call.manifest_digest)
        layout, recipe = tower_layout(call.part), call.weight_format.recipe
        check_tensors(cached.manifest, layout, recipe, hidden_size=layout.hidden_size)
        use = tower_use(call.part, call.weight_format)
        self._opening.add(call.session)
        try:
            self._shards.take()
            try:
                await self._peer.reserve(name, use, self._user)
                try:
                    program = await self._load(call, use.total)
                except BaseException:
                    self._peer.release(name)
                    raise
            except BaseException:
                self._shards.give_back()
                raise
        finally:
            self._opening.discard(call.session)
        self._towers[call.session] = _Tower(
            program=program,
            part=call.part,
            turn=asyncio.Lock(),
            rows=np.empty((0, call.part.output_size), np.float32),
        )
        return messages.Done()

    async def _load(self, call: messages.OpenTower, room_bytes: int) -> TowerProgram:
        cached = self._weights.sealed(call.manifest_digest)
        weights = ShardWeights(
            path=cached.path,
            manifest=cached.manifest,
            packed=self._peer.packed,
            load_room_bytes=self._peer.free_now_bytes(None) + room_bytes,
        )
        threads, backend = self._peer.settings.threads, self._peer.settings.backend
        async with self._peer.loading.turn(self._owner):
            return await run_blocking(
                lambda: open_tower(
                    call.part, weights, call.weight_format, backend=backend, threads=threads
                ),
                discard=lambda program: program.close(),
            )

    async def _put_hidden(self, call: messages.PutHidden) -> messages.Done:
        hosted = self._get(call.session)
        async with hosted.turn:
            hidden = self._begun(hosted, call) if call.first == 0 else hosted.hidden
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
        return messages.Done()

    def _begun(self, hosted: _Tower, call: messages.PutHidden) -> _Hidden:
        """Room for the hidden state of a tile, checked against the tower before it is taken."""
        part = hosted.part
        if part.is_first:
            raise ProtocolError("the first part of a tower reads patches")
        try:
            part.tower.row_grid(call.height, call.width)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        shape = call.height * call.width, part.tower.encoder.hidden_size
        hosted.hidden = None  # two of them are not in the ledger
        rows = np.empty(shape, np.float32)
        hosted.hidden = _Hidden(height=call.height, width=call.width, rows=rows)
        return hosted.hidden

    async def _read(self, call: messages.ReadTile) -> messages.Done:
        hosted = self._get(call.session)
        if hosted.part.is_first:
            tile = self._tile(call)
            async with hosted.turn:
                hosted.rows = await run_blocking(lambda: hosted.program.read(tile))
            return messages.Done()
        async with hosted.turn:
            hidden, hosted.hidden = hosted.hidden, None
            size = call.height, call.width
            if (
                hidden is None
                or len(call.patches)
                or size != (hidden.height, hidden.width)
                or hidden.count != len(hidden.rows)
            ):
                raise ProtocolError("the hidden state of this tile is not complete")
            hosted.rows = await run_blocking(lambda: hosted.program.go_on(hidden.rows, *size))
        return messages.Done()

    def _tile(self, call: messages.ReadTile) -> Tile:
        """The tile, checked against the tower. Raises ProtocolError for any other."""
        tower = self._get(call.session).part.tower
        try:
            tile = tile_of(call.patches, call.height, call.width, tower.patch_elements)
            tower.check(tile)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return tile

    async def _take_rows(self, call: messages.TakeRows) -> messages.TileRows:
        rows = self._get(call.session).rows
        if not 0 <= call.first < call.last <= len(rows):
            raise ProtocolError(f"rows {call.first} to {call.last} of {len(rows)}")
        found = np.ascontiguousarray(rows[call.first : call.last], "<f4")
        return messages.TileRows(rows=found.view(np.uint8).reshape(-1).data)

    async def _close(self, call: messages.CloseTower) -> messages.Done:
        await uninterrupted(self._end(call.session))
        return messages.Done()

    def _get(self, session: str) -> _Tower:
        hosted = self._towers.get(session)
        if hosted is None:
            raise ProtocolError("the tower is not open")
        return hosted

    async def _end(self, session: str) -> None:
        hosted = self._towers.pop(session, None)
        if hosted is None:
            return
        try:
            async with hosted.turn:
                await run_blocking(hosted.program.close)
        finally:
            self._peer.release(_use_name(session))
            self._shards.give_back()


def hidden_bytes(tower: Tower) -> int:
    """Bytes of the hidden state of its largest tile."""
    return 4 * tower.max_patches * tower.encoder.hidden_size


def _use_name(session: str) -> str:
    return f"{session}/tower"
