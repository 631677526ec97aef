"""Tiles of a picture: where they lie, and how their results become those of the whole picture.

A tile begins at a multiple of the graph's step: where its layers make a picture smaller, they join
the same pixels of a tile as of the whole picture. Neighbours overlap, and each result is taken up
to the middle of the overlap. So results are those of the whole picture if half of the overlap is as
wide as what a result depends on (Ronneberger et al., 2015, overlap-tile strategy).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.graphs.onnx_file import GraphValue

LEAST_TILE, MOST_TILE = 16, 1 << 16
_WHOLE_STEPS = 64
"""Larger tiles are a multiple of this, so that the step shows in the sizes between layers."""
_MOST_STEP = 64

Axes = tuple[int, int]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TileSize:
    """What a user asks for: pixels of a side, and pixels that neighbours share."""

    size: int
    overlap: int

    @classmethod
    def checked(cls, asked: object) -> TileSize:
        """From `(size, overlap)`. Raises RequestError for anything else."""
        pair = tuple(asked) if isinstance(asked, tuple | list) else ()
        if len(pair) != 2 or any(type(each) is not int for each in pair):
            raise RequestError("tiles must be (size, overlap), in pixels, as (512, 64)")
        size, overlap = pair
        if size >= _WHOLE_STEPS:
            size -= size % _WHOLE_STEPS
        if not LEAST_TILE <= size <= MOST_TILE or not 0 <= overlap <= size // 2:
            raise RequestError(
                f"tiles have {LEAST_TILE} to {MOST_TILE} pixels and overlap by half of them at most"
            )
        return cls(size, overlap)


@dataclass(frozen=True, slots=True)
class TileSpan:
    """A tile in one direction: its pixels, and those of them whose results are taken."""

    start: int
    stop: int
    first: int
    last: int


def spans(length: int, tile: TileSize, step: int, grain: int) -> list[TileSpan]:
    """The tiles of so many pixels in one direction. Each begins at a multiple of `step`, and its
    results at one of `grain`.

    Raises RequestError if tiles of this size have no room for their overlap.
    """
    stride = (tile.size - tile.overlap) // step * step
    if stride < step:
        raise RequestError(
            f"tiles of {tile.size} pixels that overlap by {tile.overlap} are too small for this "
            f"graph, which joins {step} pixels",
            remedy="give larger tiles",
        )
    shared = tile.size - stride
    if length > tile.size:  # as many tiles as are needed, and no larger than that
        least = math.ceil((length - shared) / math.ceil((length - shared) / stride))
        stride = math.ceil(least / step) * step
    starts = list(range(0, max(1, length - shared), stride))
    stops = [*(start + stride + shared for start in starts[:-1]), length]
    middles = [
        (stop + start) // 2 // grain * grain for stop, start in zip(stops, starts[1:], strict=False)
    ]
    edges = [0, *middles, length]
    return [
        TileSpan(start, stop, first, last)
        for start, stop, (first, last) in zip(starts, stops, pairwise(edges), strict=True)
    ]


def picture_axes(value: GraphValue) -> Axes | None:
    """The axes of height and width: two neighbours of a shape that are free, behind a batch or
    channels if there are some. None: the value is no picture."""
    free = [not isinstance(size, int) for size in value.shape or ()]
    pairs = {3: ((1, 2), (0, 1)), 4: ((2, 3), (1, 2))}.get(len(free), ())
    return next((pair for pair in pairs if free[pair[0]] and free[pair[1]]), None)


def step_of(shapes: Iterable[tuple[int, ...]], tile: TileSize) -> int:
    """How many pixels the layers join, from the shapes of tensors between them for one tile. Its
    height and width are equal, so they are equal neighbours in these shapes, too."""
    sides = {one for shape in shapes for one, other in pairwise(shape[1:]) if one == other > 1}
    factors = {tile.size // side for side in sides if tile.size % side == 0}
    return math.lcm(*(each for each in factors if each <= _MOST_STEP))


@dataclass(frozen=True, slots=True)
class Merged:
    """How an output follows from the picture: its axes, and its pixels for each of the picture."""

    axes: Axes
    scale: Fraction

    @classmethod
    def seen(cls, name: str, sizes: Sequence[Axes], shapes: Sequence[tuple[int, ...]]) -> Merged:
        """From two pictures of unlike height and width, and the output's shape for each. Raises
        RequestError if it is no picture."""
        one, other = shapes
        axes = tuple(
            axis for axis in range(len(one)) if one[axis : axis + 1] != other[axis : axis + 1]
        )
        scales = {Fraction(one[axis], sizes[0][way]) for way, axis in enumerate(axes[:2])}
        scale = scales.pop() if len(scales) == 1 else Fraction(0)
        # The other picture may have sides of no whole steps.
        near = [abs(other[axis] - sizes[1][way] * scale) < 1 for way, axis in enumerate(axes[:2])]
        if not scale or len(one) != len(other) or len(axes) != 2 or not all(near):
            raise RequestError(
                f"the output {name!r:.80} cannot be put together from tiles: it has the shape "
                f"{list(one)} for {sizes[0]} pixels, and {list(other)} for {sizes[1]}",
                remedy="load the graph without tiles",
            )
        return cls((axes[0], axes[1]), scale)

    def place(self, pixel: int) -> int:
        """Where the results of the pixels from this one on begin."""
        return int(pixel * self.scale)


def cut(array: NDArray[Any], axes: Axes, rows: slice, columns: slice) -> NDArray[Any]:
    """A view of some rows and columns."""
    index: list[slice] = [slice(None)] * array.ndim
    index[axes[0]], index[axes[1]] = rows, columns
    return array[tuple(index)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """How the pictures of one graph are cut, and its results put together."""

    tile: TileSize
    axes: Mapping[str, Axes]
    """Height and width of the inputs that are pictures."""
    step: int
    merged: Mapping[str, Merged]
    """By output."""
    rests: Axes
    """Pixels of height and width beyond whole steps that tiles were checked with."""

    @property
    def grain(self) -> int:
        return math.lcm(*(each.scale.denominator for each in self.merged.values()))

    def share(self, size: Axes) -> float:
        """The pixels of a picture's tiles, as a share of those of as many whole tiles."""
        tiles = self.tiles(size)
        pixels = sum((y.stop - y.start) * (x.stop - x.start) for y, x in tiles)
        return pixels / (len(tiles) * self.tile.size**2)

    def tiles(self, size: Axes) -> list[tuple[TileSpan, TileSpan]]:
        """Rows and columns of the tiles of a picture; the last one comes first."""
        rows, columns = (spans(length, self.tile, self.step, self.grain) for length in size)
        found = list(itertools.product(rows, columns))
        return [found[-1], *found[:-1]]


class TiledPicture:
    """One run's pictures, cut into tiles, and their results as they come."""

    def __init__(self, inputs: Arrays, tiling: TilePlan) -> None:
        """Raises RequestError for pictures of unlike sizes, and for sizes that were not checked:
        layers may join other pixels of a picture whose sides are no whole steps."""
        self._inputs, self._tiling = inputs, tiling
        self.size = size_of(inputs, tiling.axes)
        for length, rest in zip(self.size, tiling.rests, strict=True):
            if length > tiling.tile.size and length % tiling.step not in (0, rest):
                raise RequestError(
                    f"a picture of {self.size[0]} x {self.size[1]} pixels has a side that is no "
                    f"multiple of {tiling.step}, and the sample had none such",
                    remedy="pad the picture, or load the graph with a sample of its size",
                )
        self._results: dict[str, NDArray[Any]] = {}
        self._waiting: list[tuple[TileSpan, TileSpan, Arrays]] | None = []
        """Results that came before the size of all is known; None: it is."""

    def inputs_of(self, rows: TileSpan, columns: TileSpan) -> dict[str, NDArray[Any]]:
        """The inputs of a tile. What is no picture is the same for all."""
        places = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        axes = self._tiling.axes
        return {
            name: cut(array, axes[name], *places) if name in axes else array
            for name, array in self._inputs.items()
        }

    def take(self, rows: TileSpan, columns: TileSpan, found: Arrays) -> None:
        """Put the results of a tile into those of the picture."""
        if self._waiting is not None:
            self._waiting.append((rows, columns, found))
            if (rows.last, columns.last) != self.size:
                return
            self._make(rows, columns, found)
            waiting, self._waiting = self._waiting, None
            for each in waiting:
                self._put(*each)
        else:
            self._put(rows, columns, found)

    def results(self) -> dict[str, NDArray[Any]]:
        """The results, once all tiles were taken."""
        return self._results

    def _make(self, rows: TileSpan, columns: TileSpan, found: Arrays) -> None:
        """Room for all, by the results of the last tile."""
        for name, array in found.items():
            how, shape = self._tiling.merged[name], list(array.shape)
            for axis, span in zip(how.axes, (rows, columns), strict=True):
                shape[axis] += how.place(span.start)
            self._results[name] = np.empty(shape, array.dtype)

    def _put(self, rows: TileSpan, columns: TileSpan, found: Arrays) -> None:
        for name, array in found.items():
            how = self._tiling.merged[name]
            there, here = [], []
            for span, length in zip((rows, columns), self.size, strict=True):
                start, first = how.place(span.start), how.place(span.first)
                last = None if span.last == length else how.place(span.last)
                there.append(slice(first, last))
                here.append(slice(first - start, None if last is None else last - start))
            cut(self._results[name], how.axes, *there)[...] = cut(array, how.axes, *here)


def size_of(inputs: Arrays, axes: Mapping[str, Axes]) -> Axes:
    """Height and width of the pictures. Raises RequestError if they have unlike ones."""
    sizes = {(inputs[name].shape[y], inputs[name].shape[x]) for name, (y, x) in axes.items()}
    if len(sizes) != 1:
        raise RequestError(f"the pictures of one input have unlike sizes: {sorted(sizes)}")
    return sizes.pop()
