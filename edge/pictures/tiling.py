"""How each family of models resizes a picture and cuts it into tiles, by Pillow.

Imported by `decode_process.py`, which shall start quickly: nothing but the standard library. Sizes
are computed as by the image processors of `transformers`. A ValueError says why a picture does not
suit the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that decodes has Pillow; others need none
    from PIL import Image

_LONGEST_SIDE = 4096
"""The longest side of a picture that is split, in pixels."""
_LONGEST_TO_SHORTEST = 200


@dataclass(frozen=True, slots=True)
class CutPicture:
    """The tiles of a picture in the order of their tokens, and the grid that it was split into;
    0 x 0: it was not split."""

    tiles: list[Image.Image]
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTiling:
    """Squares of a grid, and behind them the whole picture as one square (Idefics 3, SmolVLM)."""

    longest: int
    """Pixels of the picture's longest side, before it is split."""
    side: int
    """Pixels of a square's side."""
    splits: bool
    resample: int

    def cut(self, picture: Image.Image) -> CutPicture:
        width, height = _with_longest(*picture.size, self.longest)
        picture = _resized(picture, width, height, self.resample)
        if not self.splits:
            return CutPicture([_resized(picture, self.side, self.side, self.resample)])
        width, height = self._grid_size(width, height)
        picture = _resized(picture, width, height, self.resample)
        rows, columns = height // self.side, width // self.side
        if rows == columns == 1:
            return CutPicture([picture])
        tiles = _grid_of(picture, rows, columns, self.side, self.side)
        whole = _resized(picture, self.side, self.side, self.resample)
        return CutPicture([*tiles, whole], rows, columns)

    def _grid_size(self, width: int, height: int) -> tuple[int, int]:
        aspect = width / height
        if width >= height:
            width = self._whole_squares(width)
            return width, self._whole_squares(int(width / aspect))
        height = self._whole_squares(height)
        return self._whole_squares(int(height * aspect)), height

    def _whole_squares(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTiling:
    """One tile that fits into a size, its sides rounded up to whole units (Pixtral)."""

    width: int
    height: int
    unit: int
    resample: int

    def cut(self, picture: Image.Image) -> CutPicture:
        width, height = picture.size
        ratio = max(height / self.height, width / self.width)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        width, height = (
            (each - 1) // self.unit * self.unit + self.unit for each in (width, height)
        )
        return CutPicture([_resized(picture, width, height, self.resample)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AreaTiling:
    """One tile with a number of pixels in a range, its sides whole units (Qwen)."""

    least: int
    most: int
    unit: int
    resample: int

    def cut(self, picture: Image.Image) -> CutPicture:
        width, height = picture.size
        if max(width, height) / min(width, height) > _LONGEST_TO_SHORTEST:
            raise ValueError(
                f"one side is more than {_LONGEST_TO_SHORTEST} times as long as the other"
            )
        unit = self.unit
        wide, high = (round(each / unit) * unit for each in (width, height))
        if wide * high > self.most:
            scale = math.sqrt(width * height / self.most)
            wide, high = (
                max(unit, math.floor(each / scale / unit) * unit) for each in (width, height)
            )
        elif wide * high < self.least:
            scale = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(each * scale / unit) * unit for each in (width, height))
        return CutPicture([_resized(picture, wide, high, self.resample)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CropTiling:
    """The whole picture as one tile of a fixed size, and crops of a long picture (Gemma 3)."""

    width: int
    height: int
    resample: int
    most_crops: int = 0
    """0: no crops."""
    least_crop: int = 256
    """Pixels of a crop's shorter side."""
    least_ratio: float = 1.2
    """How much longer a long picture is than wide."""

    def cut(self, picture: Image.Image) -> CutPicture:
        crops = self._crops(picture) if self.most_crops else []
        return CutPicture(
            [_resized(each, self.width, self.height, self.resample) for each in (picture, *crops)]
        )

    def _crops(self, picture: Image.Image) -> list[Image.Image]:
        shorter, longer = sorted(picture.size)
        if longer / shorter < self.least_ratio:
            return []
        count = min(longer // self.least_crop, math.floor(longer / shorter + 0.5))
        count = min(max(2, count), self.most_crops)
        length = math.ceil(longer / count)
        if min(length, shorter) < self.least_crop:
            return []
        if picture.width >= picture.height:
            return _grid_of(picture, 1, count, length, shorter)
        return _grid_of(picture, count, 1, shorter, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTiling:
    """One tile of at most a number of patches, its sides whole units of pooled ones (Gemma 4)."""

    patch: int
    pooled: int
    """Patches of a row's side."""
    most_rows: int
    resample: int
    unit: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.patch * self.pooled)

    def cut(self, picture: Image.Image) -> CutPicture:
        width, height = picture.size
        most = self.most_rows * self.pooled**2 * self.patch**2
        scale = math.sqrt(most / (width * height))
        wide, high = (math.floor(scale * each / self.unit) * self.unit for each in (width, height))
        if not wide and not high:
            raise ValueError("the model takes too few rows for any picture")
        longest = self.most_rows * self.unit
        if not high:
            wide, high = min(width // height * self.unit, longest), self.unit
        elif not wide:
            wide, high = self.unit, min(height // width * self.unit, longest)
        if wide * high > most:
            raise ValueError("the model takes too few rows for a picture of this shape")
        return CutPicture([_resized(picture, wide, high, self.resample)])


Tiling = SplitTiling | FitTiling | AreaTiling | CropTiling | BudgetTiling
TILINGS = (SplitTiling, FitTiling, AreaTiling, CropTiling, BudgetTiling)


def _with_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with this longest side; the other one is even. No side is above 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest * aspect), longest
        width = max(width + width % 2, 1)
    aspect = width / height
    if width >= height and width > _LONGEST_SIDE:
        width, height = _LONGEST_SIDE, int(_LONGEST_SIDE / aspect)
    elif height > width and height > _LONGEST_SIDE:
        width, height = int(_LONGEST_SIDE * aspect), _LONGEST_SIDE
    return max(width, 1), max(height, 1)


def _resized(picture: Image.Image, width: int, height: int, resample: int) -> Image.Image:
    if width < 1 or height < 1:
        raise ValueError("it is too narrow for the model")
    return picture.resize((width, height), resample)


def _grid_of(
    picture: Image.Image, rows: int, columns: int, width: int, height: int
) -> list[Image.Image]:
    """The tiles of a grid, row by row; the last ones end with the picture."""
    return [
        picture.crop(
            (
                column * width,
                row * height,
                min((column + 1) * width, picture.width),
                min((row + 1) * height, picture.height),
            )
        )
        for row in range(rows)
        for column in range(columns)
    ]


WHOLE = FitTiling(width=1 << 26, height=1 << 26, unit=1, resample=2)
"""One tile as large as the picture."""
