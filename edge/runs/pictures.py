"""Pictures of prompts, read by a tower on the cluster's devices.

The tower is loaded with the first picture (`edge/runs/loaded_tower.py`). If a device of it is lost,
others get it. Rows that were read are kept for later turns of a conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from edge.answers.answer import AnswerPictures
from edge.answers.terms import Terms
from edge.errors import RequestError
from edge.kernels.attention.tiles import LARGEST_HEAD
from edge.models.pictures import Tile, is_row, row_ids
from edge.models.spec import PLACED_PICTURES, TILED_ATTENTION
from edge.models.towers.tower import Tower
from edge.planning.proposal import Proposal
from edge.planning.tower_place import (
    largest_tile_seconds,
    parts_seconds,
    reading_order,
    total_s,
    tower_rates,
)
from edge.progress import OnProgress, ignore_progress
from edge.protocol.peer_info import PeerInfo, describe_all
from edge.runs.loaded_tower import LoadedTower, ReaderLostError, Rows, TowerLoader
from edge.runs.resolved import ResolvedLoad
from edge.scheduling.prompt_pictures import PromptPictures, turned
from edge.weights.checkpoint import Checkpoint
from edge.weights.tower import tower_format

MOST_KEPT_BYTES = 256 << 20
"""Rows of pictures that are kept."""

_TRIES = 3
"""How often a picture is read, each time without the devices that were lost, before the answer
fails."""

_log = logging.getLogger(__name__)


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
        proposal: Callable[[], Proposal],
        place: str,
        tell: OnProgress = ignore_progress,
    ) -> None:
        """checkpoint: of a model with a tower. candidates: the cluster's devices; proposal: that by
        which the model runs now. place: where pictures will be read, in words."""
        assert checkpoint.tower is not None
        self.tower: Tower = checkpoint.tower
        self.digest = tower_digest(checkpoint)
        self.read = 0
        """Tiles that were read so far."""
        self._model_format = load.weight_format
        self._loader = TowerLoader(
            path=checkpoint.path,
            fingerprint=checkpoint.tower_fingerprint,
            tower=self.tower,
            weight_format=tower_format(self.tower, load.weight_format),
            tell=tell,
        )
        self._chunk_tokens = load.limits.chunk_tokens
        mixers = load.spec.attentions.values()
        self._has_axes = any(each.rotary.axes for each in mixers)
        self._sees_pictures = any(each.sees_pictures for each in mixers)
        self._largest_head = max((each.head_size for each in mixers), default=0)
        self._candidates, self._proposal = candidates, proposal
        self.place = place
        """Where pictures are read, in words."""
        self._turn = asyncio.Lock()
        self._loaded: LoadedTower | None = None
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        """Rows by the digest of their tile; the newest last."""

    @property
    def devices(self) -> list[str]:
        """The names of the devices that read pictures, several if the tower is cut; empty: none
        does at the moment."""
        return [] if self._loaded is None else self._loaded.devices

    async def read_for(self, terms: Terms) -> AnswerPictures:
        """The pictures of a prompt.

        Raises RequestError for a prompt with rows of no picture, CapacityError if no device has
        room for the tower, and NetworkError if all that have are lost.
        """
        begun_s = time.perf_counter()
        predicted_s: list[float | None] = []
        rows: dict[int, Rows] = {}
        grids: dict[int, tuple[int, int]] = {}
        for tile in terms.tiles:
            read, is_new = await self._rows(tile)
            if is_new:
                predicted_s.append(self._predicted_s(tile))
            ids = row_ids(tile, len(read), self.digest)
            grids[ids[0]] = self.tower.row_grid(tile.height, tile.width)
            rows |= zip(ids, read, strict=True)
        if any(is_row(id) and id not in rows for id in terms.prompt):
            raise RequestError("the prompt has rows of a picture that was not given")
        return AnswerPictures(
            rows=rows,
            places=self._places(terms.prompt, grids),
            tiles_read=len(predicted_s),
            seconds=time.perf_counter() - begun_s,
            predicted_s=total_s(predicted_s),
        )

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
        planned = [each for each in self._candidates() if each.id in self._proposal().plan.devices]
        unable = [each.name for each in planned if PLACED_PICTURES in each.lacks]
        if unable:
            raise RequestError(
                f"{', '.join(unable)} cannot compute the pictures of this model on a GPU",
                remedy="start its peer with --backend ort",
            )
        unable = [each.name for each in planned if TILED_ATTENTION in each.lacks]
        if unable and self._sees_pictures:
            raise RequestError(
                f"{', '.join(unable)} cannot compute rows of a picture that see each other",
                remedy="install edge-inference[fast] there",
            )
        if self._sees_pictures and self._largest_head > LARGEST_HEAD:
            raise RequestError(
                f"rows of a picture that see each other, in heads of {self._largest_head} elements"
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

    async def _rows(self, tile: Tile) -> tuple[Rows, bool]:
        """The rows of a tile, and whether it was read for them now."""
        self.tower.check(tile)
        async with self._turn:
            rows = self._kept.get(tile.digest)
            is_new = rows is None
            if rows is None:
                rows = await self._read(tile)
                self._kept[tile.digest] = rows
                while sum(each.nbytes for each in self._kept.values()) > MOST_KEPT_BYTES and (
                    len(self._kept) > 1
                ):
                    self._kept.popitem(last=False)
            self._kept.move_to_end(tile.digest)
            return rows, is_new

    async def _read(self, tile: Tile) -> Rows:
        """Have the tower read the tile; again on other devices if one is lost meanwhile."""
        lost: set[str] = set()
        for number in range(_TRIES):
            try:
                if self._loaded is None:
                    self._loaded = await self._load(lost)
                rows = await self._loaded.read(tile)
            except ReaderLostError as error:
                lost.add(error.device)
                await self._free()
                if number + 1 == _TRIES:
                    raise error.error from error
                _log.warning("a picture is read by another device: %s", error)
            else:
                self.read += 1
                return rows
        raise AssertionError("it has returned or raised")

    async def _load(self, lost: Collection[str]) -> LoadedTower:
        """Load the tower on the devices that are there now."""
        known, proposal = self._candidates(), self._proposal()
        peers, _failures = await describe_all({each.address: each.credentials for each in known})
        there = [each for each in peers if each.id not in lost]
        rates = tower_rates(proposal, there)
        seconds = largest_tile_seconds(self.tower, self._model_format, rates)
        order = reading_order(there, proposal.plan.devices, seconds)
        loaded = await self._loader.load(order)
        self.place = f"pictures are read on {' and '.join(loaded.devices)}"
        return loaded

    def _predicted_s(self, tile: Tile) -> float | None:
        """Predicted seconds of a tile where the tower is now; None if rates are not known."""
        if self._loaded is None:
            return None
        parts = [(each.device, each.part) for each in self._loaded.parts]
        rates = tower_rates(self._proposal(), self._candidates())
        return parts_seconds(parts, self._model_format, rates, tile.height * tile.width)

    async def _free(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await loaded.aclose()

    async def aclose(self) -> None:
        """Free the tower. May be called again."""
        async with self._turn:
            await self._free()
            self._kept.clear()
