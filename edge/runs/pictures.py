"""Pictures of prompts, read by a tower on one of the cluster's devices.

The tower is a session of its own, loaded with the first picture: best on a device that the model's
plan leaves out. If its device is lost, another one gets it. Rows that were read are kept for later
turns of a conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import AnswerPictures
from edge.answers.terms import Terms
from edge.concurrency.blocking import run_blocking
from edge.errors import (
    CapacityError,
    CheckpointError,
    EdgeError,
    NetworkError,
    PeerError,
    RequestError,
)
from edge.host.cache_paths import cache_root
from edge.models.pictures import Tile, is_row, row_ids
from edge.models.spec import PLACED_PICTURES
from edge.models.towers.tower import Tower
from edge.planning.tower_place import reading_order
from edge.progress import OnProgress, ignore_progress
from edge.protocol.client import PeerClient
from edge.protocol.messages import CloseTower, OpenTower, ReadTile, TakeRows
from edge.protocol.peer_info import PeerInfo, describe_all
from edge.runs.resolved import ResolvedLoad
from edge.runs.shipping import describe_shard, ship
from edge.scheduling.prompt_pictures import PromptPictures, turned
from edge.weights.checkpoint import Checkpoint
from edge.weights.tower import tower_format, tower_layout

MOST_KEPT_BYTES = 256 << 20
"""Rows of pictures that are kept."""

MOST_ANSWER_BYTES = 8 << 20
"""Bytes of rows that are taken at once."""

_TRIES = 3
"""Devices that read a picture, one after the other, before the answer fails."""

_FREED_WITHIN_S = 1.0

_log = logging.getLogger(__name__)

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A tower on a device."""

    client: PeerClient
    session: str
    device: str


def tower_digest(checkpoint: Checkpoint) -> bytes:
    """A digest of a checkpoint's tower and the files of its weights, for the ids of rows. Raises
    CheckpointError."""
    assert checkpoint.tower is not None
    both = checkpoint.tower.digest + checkpoint.tower_fingerprint.encode()
    return hashlib.blake2b(both, digest_size=16).digest()


class Pictures:
    """The tower of one model. For one event loop. Close with `aclose`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        load: ResolvedLoad,
        *,
        candidates: Callable[[], Sequence[PeerInfo]],
        planned: Callable[[], Collection[str]],
        tell: OnProgress = ignore_progress,
    ) -> None:
        """checkpoint: of a model with a tower. candidates: the cluster's devices; planned: ids of
        those that the model runs on."""
        assert checkpoint.tower is not None
        self.tower: Tower = checkpoint.tower
        self.digest = tower_digest(checkpoint)
        self.read = 0
        """Tiles that were read so far."""
        self._path, self._fingerprint = checkpoint.path, checkpoint.tower_fingerprint
        self._weight_format = tower_format(self.tower, load.weight_format)
        self._chunk_tokens = load.limits.chunk_tokens
        self._kv_dtype = load.kv_dtype
        mixers = load.spec.attentions.values()
        self._has_axes = any(each.rotary.axes for each in mixers)
        self._sees_pictures = any(each.sees_pictures for each in mixers)
        self._candidates, self._planned = candidates, planned
        self._tell = tell
        self._turn = asyncio.Lock()
        self._loaded: _Loaded | None = None
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        """Rows by the digest of their tile; the newest last."""

    @property
    def device(self) -> str | None:
        """The name of the device that reads pictures; None: none does at the moment."""
        return None if self._loaded is None else self._loaded.client.name

    async def read_for(self, terms: Terms) -> AnswerPictures:
        """The pictures of a prompt.

        Raises RequestError for a prompt with rows of no picture, CapacityError if no device has
        room for the tower, and NetworkError if all that have are lost.
        """
        rows: dict[int, Rows] = {}
        grids: dict[int, tuple[int, int]] = {}
        for tile in terms.tiles:
            read = await self._rows(tile)
            ids = row_ids(tile, len(read), self.digest)
            grids[ids[0]] = self.tower.row_grid(tile.height, tile.width)
            rows |= zip(ids, read, strict=True)
        if any(is_row(id) and id not in rows for id in terms.prompt):
            raise RequestError("the prompt has rows of a picture that was not given")
        return AnswerPictures(rows=rows, places=self._places(terms.prompt, grids))

    def _places(
        self, prompt: Sequence[int], grids: Mapping[int, tuple[int, int]]
    ) -> PromptPictures | None:
        """grids: rows and columns of a picture, by the id of its first row."""
        if not (self._has_axes or self._sees_pictures):
            return None
        at = {place: grids[id] for place, id in enumerate(prompt) if id in grids}
        blocks = tuple((first, first + math.prod(grid)) for first, grid in at.items())
        if any(not is_row(id) for first, last in blocks for id in prompt[first:last]):
            raise RequestError("the rows of a picture must follow each other in the prompt")
        unable = [
            each.name
            for each in self._candidates()
            if each.id in self._planned() and PLACED_PICTURES in each.lacks
        ]
        if unable:
            raise RequestError(
                f"{', '.join(unable)} cannot compute the pictures of this model on a GPU",
                remedy="start its peer with --backend ort",
            )
        if self._sees_pictures and self._kv_dtype == "int4":
            raise RequestError(
                "the rows of a picture see each other in this model, which is not computed with "
                "keys and values in int4",
                remedy="load it with another kv_dtype",
            )
        longest = max((last - first for first, last in blocks), default=0)
        if self._sees_pictures and longest > self._chunk_tokens:
            raise RequestError(
                f"a picture of {longest} rows, and a step has {self._chunk_tokens} tokens at most",
                remedy="load the model with more context_tokens",
            )
        return PromptPictures(
            turns=turned(prompt, at) if self._has_axes else None,
            blocks=blocks if self._sees_pictures else (),
        )

    async def _rows(self, tile: Tile) -> Rows:
        self.tower.check(tile)
        async with self._turn:
            rows = self._kept.get(tile.digest)
            if rows is None:
                rows = await self._read(tile)
                self._kept[tile.digest] = rows
                while sum(each.nbytes for each in self._kept.values()) > MOST_KEPT_BYTES and (
                    len(self._kept) > 1
                ):
                    self._kept.popitem(last=False)
            self._kept.move_to_end(tile.digest)
            return rows

    async def _read(self, tile: Tile) -> Rows:
        """Have a device read the tile; another one if it is lost meanwhile."""
        lost: set[str] = set()
        for number in range(_TRIES):
            try:
                if self._loaded is None:
                    self._loaded = await self._load(lost)
                rows = await self._ask(self._loaded, tile)
            except (NetworkError, PeerError) as error:
                if self._loaded is not None:
                    lost.add(self._loaded.device)
                await self._free()
                if number + 1 == _TRIES:
                    raise
                _log.warning("a picture is read by another device: %s", error)
            else:
                self.read += 1
                return rows
        raise AssertionError("it has returned or raised")

    async def _ask(self, loaded: _Loaded, tile: Tile) -> Rows:
        client, session, width = loaded.client, loaded.session, self.tower.row_size
        await client.call(
            ReadTile(
                session=session,
                height=tile.height,
                width=tile.width,
                patches=np.ascontiguousarray(tile.patches).view(np.uint8).reshape(-1).data,
            )
        )
        count = self.tower.rows(tile.height, tile.width)
        at_once = max(1, MOST_ANSWER_BYTES // (4 * width))
        rows = np.empty((count, width), np.float32)
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            told = await client.call(TakeRows(session=session, first=first, last=last))
            if len(told.rows) != 4 * width * (last - first):
                raise PeerError(client.name, f"sent {len(told.rows)} bytes of a picture's rows")
            rows[first:last] = np.frombuffer(told.rows, "<f4").reshape(last - first, width)
        if not np.isfinite(rows).all():
            raise PeerError(client.name, "sent rows of a picture with NaN or infinity; restart it")
        return rows

    async def _load(self, lost: Collection[str]) -> _Loaded:
        """Load the tower on the first device that has room."""
        known = self._candidates()
        peers, _failures = await describe_all({each.address: each.credentials for each in known})
        refused: CapacityError | None = None
        for peer in reading_order([each for each in peers if each.id not in lost], self._planned()):
            try:
                return await self._load_on(peer)
            except CapacityError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        raise NetworkError("no device is left that could read pictures")

    async def _load_on(self, peer: PeerInfo) -> _Loaded:
        opening = run_blocking(lambda: Checkpoint.open(self._path), discard=Checkpoint.close)
        with await opening as checkpoint:
            if checkpoint.tower is None or checkpoint.tower_fingerprint != self._fingerprint:
                raise CheckpointError(f"{self._path} was changed since the model was loaded")
            root = cache_root()
            source = await run_blocking(
                lambda: checkpoint.tower_source(
                    self._weight_format, cache_root=root / "quantized", on_progress=self._tell
                ),
                discard=lambda source: source.close(),
            )
            with contextlib.closing(source):
                shipment = await run_blocking(
                    lambda: describe_shard(
                        tower_layout(self.tower),
                        source,
                        self._weight_format,
                        fingerprint=self._fingerprint,
                        cache_root=root / "manifests",
                        on_progress=lambda _done, _total: None,
                    )
                )
                client, _sent_bytes = await ship(
                    shipment, peer.connect, peer=peer.name, on_progress=self._tell
                )
        session = uuid.uuid4().hex
        try:
            await client.call(
                OpenTower(
                    session=session,
                    tower=self.tower,
                    weight_format=self._weight_format,
                    manifest_digest=shipment.manifest.digest,
                )
            )
        except BaseException:
            await client.aclose()
            raise
        _log.info("pictures are read on %s", peer.name)
        return _Loaded(client=client, session=session, device=peer.id)

    async def _free(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        with contextlib.suppress(EdgeError):  # else the peer frees it when the connection ends
            await loaded.client.call(CloseTower(session=loaded.session), limit_s=_FREED_WITHIN_S)
        await loaded.client.aclose()

    async def aclose(self) -> None:
        """Free the tower. May be called again."""
        async with self._turn:
            await self._free()
            self._kept.clear()
