"""A tower on the cluster's devices: loaded on one of them or cut over several, asked, and freed."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.concurrency.blocking import run_blocking
from edge.errors import CapacityError, CheckpointError, EdgeError, NetworkError, PeerError
from edge.host.cache_paths import cache_root
from edge.memory.tower_memory import tower_use
from edge.models.pictures import Tile
from edge.models.towers.part import TowerPart
from edge.models.towers.tower import Tower
from edge.planning.tower_place import divided
from edge.progress import OnProgress
from edge.protocol.client import PeerClient
from edge.protocol.frame_codec import MOST_COPY_BYTES, Call
from edge.protocol.peer_info import PeerInfo
from edge.protocol.tower_frames import CloseTower, OpenTower, PutHidden, ReadTile, TakeRows
from edge.runs.shipping import describe_shard, ship
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import WeightFormat
from edge.weights.matrix_kind import WeightSource
from edge.weights.tower import tower_layout

MOST_ANSWER_BYTES = 8 << 20
"""Bytes of rows that are taken at once."""

_FREED_WITHIN_S = 1.0

_log = logging.getLogger(__name__)

Rows = NDArray[np.float32]
Answer = TypeVar("Answer")


class ReaderLostError(Exception):
    """A device failed while it loaded or read. Stays within this package."""

    def __init__(self, device: str, error: NetworkError | PeerError) -> None:
        """device: its id."""
        super().__init__(str(error))
        self.device, self.error = device, error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """A part of a tower on a device."""

    part: TowerPart
    client: PeerClient
    session: str
    device: str
    """Its id."""

    async def call(self, asked: Call[Answer]) -> Answer:
        """Raises ReaderLostError if the device fails."""
        try:
            return await self.client.call(asked)
        except (NetworkError, PeerError) as error:
            raise ReaderLostError(self.device, error) from error

    async def take(self, first: int, last: int) -> Rows:
        """Rows [first, last) of what it gave for a tile, [rows, output size]."""
        told = await self.call(TakeRows(session=self.session, first=first, last=last))
        shape = last - first, self.part.output_size
        if len(told.rows) != 4 * shape[0] * shape[1]:
            raise self.failed(f"sent {len(told.rows)} bytes of a picture's rows")
        return np.frombuffer(told.rows, "<f4").reshape(shape)

    def failed(self, what: str) -> ReaderLostError:
        return ReaderLostError(self.device, PeerError(self.client.name, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTower:
    """A tower whose parts are loaded, in order. Close with `aclose`."""

    parts: tuple[LoadedPart, ...]

    @property
    def devices(self) -> list[str]:
        """The names of its devices."""
        return [each.client.name for each in self.parts]

    async def read(self, tile: Tile) -> Rows:
        """The rows of a tile [rows, output size]. Raises ReaderLostError."""
        before, *others = self.parts
        patches = np.ascontiguousarray(tile.patches).view(np.uint8).reshape(-1).data
        await before.call(_reading(before, tile, patches))
        for part in others:
            await _hand_on(before, part, tile)
            await part.call(_reading(part, tile, b""))
            before = part
        count, width = before.part.output_rows(tile.height, tile.width), before.part.output_size
        rows = np.empty((count, width), np.float32)
        for first, last in _spans(count, MOST_ANSWER_BYTES // (4 * width)):
            rows[first:last] = await before.take(first, last)
        if not np.isfinite(rows).all():
            raise before.failed("sent rows of a picture with NaN or infinity; restart it")
        return rows

    async def aclose(self) -> None:
        for each in self.parts:
            with contextlib.suppress(EdgeError):  # else it is freed when the connection ends
                await each.client.call(CloseTower(session=each.session), limit_s=_FREED_WITHIN_S)
            await each.client.aclose()


def _reading(part: LoadedPart, tile: Tile, patches: memoryview | bytes) -> ReadTile:
    return ReadTile(session=part.session, height=tile.height, width=tile.width, patches=patches)


async def _hand_on(before: LoadedPart, part: LoadedPart, tile: Tile) -> None:
    """Bring the hidden state of a tile from one part to the next one."""
    count, width = before.part.output_rows(tile.height, tile.width), before.part.output_size
    for first, last in _spans(count, MOST_COPY_BYTES // (4 * width)):
        rows = await before.take(first, last)
        await part.call(
            PutHidden(
                session=part.session,
                height=tile.height,
                width=tile.width,
                first=first,
                rows=rows.view(np.uint8).reshape(-1).data,
            )
        )


def _spans(count: int, at_once: int) -> Iterator[tuple[int, int]]:
    at_once = max(1, at_once)
    for first in range(0, count, at_once):
        yield first, min(first + at_once, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLoader:
    """Loads the tower of a checkpoint."""

    path: Path
    """The checkpoint."""
    fingerprint: str
    """The hash of the files with the tower's weights."""
    tower: Tower
    weight_format: WeightFormat
    """The format of the tower."""
    tell: OnProgress

    async def load(self, peers: Sequence[PeerInfo]) -> LoadedTower:
        """Load the tower on the first device that has room; where none has, over several.

        peers: as they describe themselves now, in the order in which they are asked. Raises
        CapacityError if all together have no room, NetworkError if there are none, ReaderLostError
        if a device fails, and CheckpointError if the checkpoint was changed.
        """
        if not peers:
            raise NetworkError("no device is left that could read pictures")
        whole = TowerPart.whole(self.tower)
        need = tower_use(whole, self.weight_format).total
        refused: CapacityError | None = None
        async with self._source() as source:
            for peer in (each for each in peers if each.free_now_bytes >= need):
                try:
                    return await self._load(source, [(peer, whole)])
                except _RefusedError as error:
                    refused = refused or error.error
            by_id = {each.id: each for each in peers}
            rooms = {each.id: each.free_now_bytes for each in peers}
            while parts := divided(self.tower, self.weight_format, rooms):
                try:
                    return await self._load(source, [(by_id[id], part) for id, part in parts])
                except _RefusedError as error:
                    refused = refused or error.error
                    del rooms[error.device]
            # A device may free memory for it, as that of a measurement which ends.
            for peer in (each for each in peers if each.free_now_bytes < need):
                try:
                    return await self._load(source, [(peer, whole)])
                except _RefusedError as error:
                    refused = refused or error.error
        assert refused is not None, "each device has refused it"
        raise refused

    @contextlib.asynccontextmanager
    async def _source(self) -> AsyncIterator[WeightSource]:
        """The weights of the tower."""
        opening = run_blocking(lambda: Checkpoint.open(self.path), discard=Checkpoint.close)
        with await opening as checkpoint:
            if checkpoint.tower is None or checkpoint.tower_fingerprint != self.fingerprint:
                raise CheckpointError(f"{self.path} was changed since the model was loaded")
            source = await run_blocking(
                lambda: checkpoint.tower_source(
                    self.weight_format,
                    cache_root=cache_root() / "quantized",
                    on_progress=self.tell,
                ),
                discard=lambda source: source.close(),
            )
            with contextlib.closing(source):
                yield source

    async def _load(
        self, source: WeightSource, places: Sequence[tuple[PeerInfo, TowerPart]]
    ) -> LoadedTower:
        """Load each part on its device, or none. Raises _RefusedError and ReaderLostError."""
        parts: list[LoadedPart] = []
        try:
            for peer, part in places:
                try:
                    parts.append(await self._load_part(source, peer, part))
                except CapacityError as error:
                    raise _RefusedError(peer.id, error) from error
                except (NetworkError, PeerError) as error:
                    raise ReaderLostError(peer.id, error) from error
        except BaseException:
            await LoadedTower(parts=tuple(parts)).aclose()
            raise
        loaded = LoadedTower(parts=tuple(parts))
        _log.info("pictures are read on %s", ", ".join(loaded.devices))
        return loaded

    async def _load_part(self, source: WeightSource, peer: PeerInfo, part: TowerPart) -> LoadedPart:
        shipment = await run_blocking(
            lambda: describe_shard(
                tower_layout(part),
                source,
                self.weight_format,
                fingerprint=self.fingerprint,
                cache_root=cache_root() / "manifests",
                on_progress=lambda _done, _total: None,
            )
        )
        client, _sent_bytes = await ship(
            shipment, peer.connect, peer=peer.name, on_progress=self.tell
        )
        session = uuid.uuid4().hex
        try:
            await client.call(
                OpenTower(
                    session=session,
                    part=part,
                    weight_format=self.weight_format,
                    manifest_digest=shipment.manifest.digest,
                )
            )
        except BaseException:
            await client.aclose()
            raise
        return LoadedPart(part=part, client=client, session=session, device=peer.id)


class _RefusedError(Exception):
    """A device has no room for its part."""

    def __init__(self, device: str, error: CapacityError) -> None:
        super().__init__(str(error))
        self.device, self.error = device, error
