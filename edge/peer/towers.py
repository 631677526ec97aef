"""Towers of one coordinator on this peer: loaded, asked and closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from edge.backends.interface import ShardWeights, TowerProgram
from edge.backends.registry import open_tower
from edge.concurrency.blocking import run_blocking, uninterrupted
from edge.errors import PeerError, ProtocolError
from edge.memory.tower_memory import tower_use
from edge.peer.hosted_tower import HostedTower
from edge.peer.quota import QuotaShare
from edge.peer.resources import PeerResources
from edge.peer.weight_uploads import WeightUploads
from edge.protocol import tower_frames
from edge.protocol.frame_codec import Call, Done
from edge.transport import Member
from edge.weights.shard_tensors import check_tensors
from edge.weights.tower import tower_layout


class CoordinatorTowers:
    """The towers of one coordinator. Close with `aclose`."""

    def __init__(
        self, resources: PeerResources, user: Member | None, owner: object, weights: WeightUploads
    ) -> None:
        """Resources are counted for `user` and `owner`. weights: uploads that towers load."""
        self._peer, self._user, self._weights = resources, user, weights
        self._owner = owner
        self._shards = QuotaShare(resources.shards, owner)
        self._towers: dict[str, HostedTower] = {}
        self._opening: set[str] = set()

    @property
    def calls(self) -> dict[type[Call[Any]], Callable[[Any], Awaitable[object]]]:
        return {
            tower_frames.OpenTower: self._open,
            tower_frames.PutHidden: self._put_hidden,
            tower_frames.ReadTile: self._read,
            tower_frames.TakeRows: self._take_rows,
            tower_frames.CloseTower: self._close,
        }

    @property
    def most_tile_bytes(self) -> int:
        """Bytes of the largest tile that one of them reads."""
        return max((each.most_tile_bytes for each in self._towers.values()), default=0)

    @property
    def most_hidden_bytes(self) -> int:
        """Bytes of the most rows of a hidden state that one of them takes at once."""
        return max((each.most_hidden_bytes for each in self._towers.values()), default=0)

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:  # run all of these, even if one fails
            for session in tuple(self._towers):
                stack.push_async_callback(self._end, session)

    async def _open(self, call: tower_frames.OpenTower) -> Done:
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
        self._towers[call.session] = HostedTower(call.part, program)
        return Done()

    async def _load(self, call: tower_frames.OpenTower, room_bytes: int) -> TowerProgram:
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

    async def _put_hidden(self, call: tower_frames.PutHidden) -> Done:
        await self._get(call.session).put_hidden(call)
        return Done()

    async def _read(self, call: tower_frames.ReadTile) -> Done:
        await self._get(call.session).read(call)
        return Done()

    async def _take_rows(self, call: tower_frames.TakeRows) -> tower_frames.TileRows:
        return self._get(call.session).rows(call.first, call.last)

    async def _close(self, call: tower_frames.CloseTower) -> Done:
        await uninterrupted(self._end(call.session))
        return Done()

    def _get(self, session: str) -> HostedTower:
        hosted = self._towers.get(session)
        if hosted is None:
            raise ProtocolError("the tower is not open")
        return hosted

    async def _end(self, session: str) -> None:
        hosted = self._towers.pop(session, None)
        if hosted is None:
            return
        try:
            await hosted.aclose()
        finally:
            self._peer.release(_use_name(session))
            self._shards.give_back()


def _use_name(session: str) -> str:
    return f"{session}/tower"
