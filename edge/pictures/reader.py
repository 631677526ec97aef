"""Pictures of conversations: to tiles, and to rows among the tokens of the prompt."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edge.errors import CheckpointError, RequestError
from edge.models.pictures import Tile, row_ids
from edge.pictures.decoder import Picture, PictureDecoder
from edge.pictures.marks import Grids, PictureMarks, marks_of
from edge.pictures.settings import tiling_of
from edge.pictures.tiling import AreaTiling
from edge.text import Tokenizer
from edge.text.message_texts import PICTURE
from edge.weights.picture_files import PictureFiles

_KEPT = 8
"""Pictures that are kept for the next turn of their conversation."""


class TowerRows(Protocol):
    """What a reader needs to know of a tower."""

    @property
    def digest(self) -> bytes: ...

    @property
    def max_patches(self) -> int: ...

    def row_grid(self, height: int, width: int) -> tuple[int, int]:
        """The rows of a tile of so many patches, in height and width. Raises ValueError for sizes
        that the tower does not read."""


class PictureReader:
    """Reads the pictures of one model's conversations. Thread-safe; `close` ends its process."""

    def __init__(
        self,
        files: PictureFiles,
        tower: TowerRows,
        tokenizer: Tokenizer,
        *,
        digest: bytes | None = None,
    ) -> None:
        """digest: of the tower with its weights, for the ids of rows; None: of the tower alone.

        Raises CheckpointError for settings that are invalid, and for a tokenizer that lacks the
        token of a row."""
        tiling, patch = tiling_of(files)
        if isinstance(tiling, AreaTiling):  # the settings of Qwen's models allow 65,536 patches
            tiling = replace(tiling, most=min(tiling.most, tower.max_patches * patch**2))
        self._marks = marks_of(files.model_type, tokenizer.special_tokens)
        row = tokenizer.token_id(self._marks.row)
        if row is None:
            raise CheckpointError(
                f"{files.config.source}: the tokenizer has no token {self._marks.row}, as rows of "
                "pictures need",
                remedy="download the tokenizer again",
            )
        self._row, self._tower, self._tokenizer = row, tower, tokenizer
        self._digest = tower.digest if digest is None else digest
        self._decoder = PictureDecoder(tiling, patch)
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._mutex = threading.Lock()

    @functools.cached_property
    def sees_results(self) -> bool:
        """Whether the chat template writes pictures that are in a tool's result."""
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        messages: list[Mapping[str, object]] = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": [PICTURE]},
        ]
        try:
            return self._marks.mark in self._tokenizer.chat(messages, pictures=True)
        except RequestError:
            return False

    def read(self, files: Sequence[bytes]) -> PlacedPictures:
        """The pictures in these files, in the order of the conversation.

        Raises RequestError for a file that is no picture, and for a picture that does not suit the
        model.
        """
        pictures = [self._picture(each) for each in files]
        return PlacedPictures(
            marks=self._marks,
            row_id=self._row,
            pictures=pictures,
            grids=[[self._grid(tile) for tile in each.tiles] for each in pictures],
            tower_digest=self._digest,
        )

    def _picture(self, file: bytes) -> Picture:
        key = hashlib.blake2b(file).digest()
        with self._mutex:
            if (found := self._kept.get(key)) is None:
                found = self._decoder.picture(file)
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _grid(self, tile: Tile) -> tuple[int, int]:
        if tile.height * tile.width > self._tower.max_patches:
            raise RequestError(
                f"a picture has {tile.height * tile.width:,} patches, more than the model reads",
                remedy="give a smaller picture",
            )
        try:
            return self._tower.row_grid(tile.height, tile.width)
        except ValueError as error:
            raise RequestError(
                f"a picture does not suit the model: {error}", remedy="give another picture"
            ) from error

    def close(self) -> None:
        """End the process that decodes; another picture starts a new one."""
        self._decoder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPictures:
    """The pictures of one conversation, ready to be put into its prompt."""

    marks: PictureMarks
    row_id: int
    pictures: Sequence[Picture]
    grids: Sequence[Grids]
    """The rows of the tiles of each picture."""
    tower_digest: bytes

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The different tiles of all pictures."""
        return tuple({tile.digest: tile for tile in self._tiles}.values())

    @property
    def _tiles(self) -> list[Tile]:
        return [tile for each in self.pictures for tile in each.tiles]

    def marked(self, prompt: str) -> str:
        """The prompt with the tokens of each picture in the place of its mark. Raises RequestError
        if it has another number of marks."""
        texts = prompt.split(self.marks.mark)
        if len(texts) == 1:
            raise RequestError(
                "the model's chat template has no place for pictures",
                remedy="use the chat template of the model's publisher",
            )
        self._check(len(texts) - 1, len(self.pictures))
        found = texts[0]
        for picture, grids, text in zip(self.pictures, self.grids, texts[1:], strict=True):
            found += self.marks.text(picture, grids) + text
        return found

    def placed(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a marked prompt with the ids of rows in their places. Raises RequestError
        if a text has more of them than the pictures."""
        grids = (grid for grids in self.grids for grid in grids)
        rows = [
            id
            for tile, (high, wide) in zip(self._tiles, grids, strict=True)
            for id in row_ids(tile, high * wide, self.tower_digest)
        ]
        self._check(sum(id == self.row_id for id in ids), len(rows))
        following = iter(rows)
        return [next(following) if id == self.row_id else id for id in ids]

    def _check(self, places: int, wanted: int) -> None:
        if places != wanted:
            raise RequestError(
                f"the pictures of this conversation take {wanted} places of its prompt, which has "
                f"{places}: a text has {self.marks.mark} or {self.marks.row}, or the chat template "
                "leaves pictures out",
                remedy="take it out of the text",
            )
