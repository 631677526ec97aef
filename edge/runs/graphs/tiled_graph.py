"""A graph that computes large pictures tile by tile, on all devices that help."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edge.concurrency.blocking import uninterrupted
from edge.errors import CapacityError, RequestError
from edge.graphs.onnx_file import OnnxFile
from edge.graphs.tiles import (
    Axes,
    Merged,
    TiledPicture,
    TilePlan,
    TileSize,
    cut,
    picture_axes,
    size_of,
    step_of,
)
from edge.partition import GraphEstimate
from edge.progress import OnProgress
from edge.protocol.peer_info import PeerInfo, gather_all
from edge.runs.graphs.agreement import Agreement, compare
from edge.runs.graphs.cut_graph import CutGraph, measured_graph
from edge.runs.graphs.graph_options import GraphOptions
from edge.runs.graphs.inputs import checked
from edge.runs.graphs.remote_part import Arrays


class TiledGraph:
    """A loaded graph, and how its pictures are cut. Made by `load_tiled_graph`."""

    def __init__(self, graph: CutGraph, tiling: TilePlan, size: Axes) -> None:
        """size: height and width of the sample."""
        self.graph, self.tiling, self._size = graph, tiling, size
        self.count = len(tiling.tiles(size))
        """Tiles of the sample."""

    async def run(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """The outputs for these inputs; see `CutGraph.run`."""
        return await run_tiles(self.graph, self.tiling, checked(self.graph.file.inputs, arrays))

    @property
    def picture_s(self) -> float:
        """Predicted seconds of a picture as large as the sample."""
        estimate = self.graph.estimate
        whole_s = _makespan(estimate.copies or (estimate,), self.count)
        return whole_s * self.tiling.share(self._size)

    @property
    def interval_s(self) -> float:
        """Predicted seconds between two such pictures of a stream."""
        return self.count * self.graph.estimate.interval_s * self.tiling.share(self._size)


async def run_tiles(graph: CutGraph, tiling: TilePlan, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """Compute the tiles of one picture, as many at once as the devices are worth."""
    picture = TiledPicture(inputs, tiling)
    tiles = iter(tiling.tiles(picture.size))

    async def some() -> None:
        for rows, columns in tiles:
            found = await graph.run(picture.inputs_of(rows, columns), ends_early=False)
            picture.take(rows, columns, found)

    await gather_all(some() for _ in range(graph.window))
    return picture.results()


async def load_tiled_graph(
    file: OnnxFile,
    peers: Sequence[PeerInfo],
    sample: Arrays,
    options: GraphOptions,
    on_progress: OnProgress,
    tile: TileSize,
    *,
    plan_only: bool = False,
) -> TiledGraph:
    """Measure a graph with one tile of the sample, open it, and compare some tiles with the same
    pixels computed as a whole.

    plan_only: as of `load_cut_graph`. Raises RequestError if the graph has no pictures, if the
    sample is no larger than a tile, or if the results differ; else as `load_cut_graph`. Nothing is
    left on the peers then.
    """
    axes = {each.name: found for each in file.inputs if (found := picture_axes(each)) is not None}
    if not axes:
        raise RequestError(
            "no input of the graph is a picture of any height and width",
            remedy="export it with free axes for both, or load it without tiles",
        )
    sample = checked(file.inputs, sample)
    size = size_of(sample, axes)
    if min(size) <= tile.size:
        raise _too_small(size, tile, 1)

    def upper_left(height: int, width: int) -> dict[str, NDArray[Any]]:
        return {
            name: cut(array, axes[name], slice(height), slice(width)) if name in axes else array
            for name, array in sample.items()
        }

    one = upper_left(tile.size, tile.size)
    graph = await measured_graph(file, peers, one, options, on_progress)
    try:
        measured = graph.measured
        step = step_of([each.shape for each in measured.kinds.values()], tile)
        while True:
            whole = upper_left(*(_checked_length(length, tile, step) for length in size))
            sizes = (tile.size, tile.size), size_of(whole, axes)
            if min(sizes[1]) <= tile.size:
                raise _too_small(size, tile, step)
            expected = await _computed_whole(graph, whole)
            merged = {
                name: Merged.seen(name, sizes, (measured.results[name].shape, array.shape))
                for name, array in expected.items()
            }
            rests = size[0] % step, size[1] % step
            tiling = TilePlan(tile=tile, axes=axes, step=step, merged=merged, rests=rests)
            if step % tiling.grain == 0:
                break
            step = math.lcm(step, tiling.grain)  # results need longer steps than the layers
        if plan_only:
            await graph.only_plan()
            return TiledGraph(graph, tiling, size)
        await graph.begin()
        await graph.check(one)
        if graph.atoms.is_random:
            return TiledGraph(graph, tiling, size)
        tiled = await run_tiles(graph, tiling, whole)
        graph.agreement = agreement = compare(tiled, expected, tolerance=measured.tolerance)
        if agreement.problem is not None:
            raise _differs(tile, agreement)
    except BaseException:
        await uninterrupted(graph.aclose())
        raise
    return TiledGraph(graph, tiling, size)


async def _computed_whole(graph: CutGraph, inputs: Arrays) -> Arrays:
    try:
        return await graph.measured.computed(inputs)
    except (CapacityError, RequestError) as error:
        raise CapacityError(
            f"tiles are checked by four that are computed as a whole, which failed: {error}",
            remedy="give smaller tiles, or the peers more --memory",
        ) from error


def _checked_length(length: int, tile: TileSize, step: int) -> int:
    """Pixels of the sample by which tiles are checked: two tiles, or what it has, and its rest."""
    stride = max(step, (tile.size - tile.overlap) // step * step)
    return min(length, tile.size + stride + length % step)


def _too_small(size: Axes, tile: TileSize, step: int) -> RequestError:
    return RequestError(
        f"a sample of {size[0]} x {size[1]} pixels shows nothing of tiles of {tile.size}",
        remedy=f"give one of at least {tile.size + step}, or smaller tiles",
    )


def _differs(tile: TileSize, agreement: Agreement) -> RequestError:
    return RequestError(
        f"in tiles of {tile.size} pixels that overlap by {tile.overlap}, the results are not those "
        f"of the whole picture: {agreement.problem}",
        remedy="give more overlap; a graph that looks at the whole picture at once has no tiles",
    )


def _makespan(copies: Sequence[GraphEstimate], tiles: int) -> float:
    """Seconds of so many tiles, each of which goes to the copy that would end it first."""
    ends = [(each.latency_s, number) for number, each in enumerate(copies)]
    heapq.heapify(ends)
    last_s = 0.0
    for _ in range(tiles):
        last_s, number = heapq.heappop(ends)
        heapq.heappush(ends, (last_s + max(copies[number].interval_s, 1e-9), number))
    return last_s
