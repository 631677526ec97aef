"""What slices of layers cost a peer: what goes with their bytes, and what is fixed.

A layer whose heads and columns are shared by several peers is two graphs on each of them, and each
has all operators of the layer however little of it there is. Two slices tell that apart: a half of
every layer and about an eighth lie on a line that starts at what is fixed. The rest of the time of
a whole layer goes with its bytes. (One core, a layer of 11 MB: 470 us whole, 268 half, 115 an
eighth. A cost of starting graphs alone, told by the whole and the half, makes 93 of the eighth.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from edge.profiling.cold_caches import Caches
from edge.profiling.loaded_sample import LoadedSample, Site
from edge.profiling.sample import Sample, Width
from edge.protocol.measurements import MOST_OF_WHOLE
from edge.protocol.step import Step
from edge.weights.formats import WeightFormat

_TURNS = 16
"""How often a step of one row is timed: these decide most."""

_FEWER_TURNS = 6
_FEWEST_TURNS = 2
_SPAN_S = 1.0
"""The fewer turns take this long, where steps are slow."""

_LEAST_PART = 0.1
"""The least part of whole layers' time that goes with their bytes; less is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTimes:
    """One slice of a layer: its two graphs."""

    attention_bytes: int
    feed_forward_bytes: int
    attention_s: float
    """Without the reading of the cache."""
    feed_forward_s: float

    @property
    def nbytes(self) -> int:
        return self.attention_bytes + self.feed_forward_bytes

    @property
    def seconds(self) -> float:
        return self.attention_s + self.feed_forward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCosts:
    """What was measured of slices."""

    slices: tuple[tuple[SliceTimes, SliceTimes], ...]
    """For each step, a half and a narrow one."""
    run_s: float
    """A graph that adds two arrays and nothing else."""
    jitter: float
    """Standard deviation of the time of a run, as a part of its mean."""
    start_s: float
    """What a step takes longer because nothing of it is in a cache when it begins."""


def slice_costs(
    site: Site,
    sample: Sample,
    weight_format: WeightFormat,
    caches: Caches,
    steps: Sequence[Step],
    attention_s: Sequence[float],
) -> SliceCosts:
    """Measures both slices in turn, in each of these steps, of which the first has one row.

    `attention_s` is for each step the seconds per row, cached token and query head.
    """
    half = LoadedSample(site, sample, "half", weight_format)
    try:
        narrow = LoadedSample(site, sample, "narrow", weight_format)
        try:
            turns = [_in_turn(site, half, narrow, step, caches) for step in steps]
        finally:
            narrow.close()
    finally:
        half.close()
    slices = []
    for step, turn, each_s in zip(steps, turns, attention_s, strict=True):
        head_s = each_s * step.batch * step.num_tokens * step.entries[0].end
        slices.append(
            (
                _slice_times(sample, "half", weight_format, turn.half, head_s),
                _slice_times(sample, "narrow", weight_format, turn.narrow, head_s),
            )
        )
    decoded = turns[0].half
    medians = np.median(decoded, axis=0)
    ratios = decoded[:, :-1] / medians[:-1]
    # Half of what lies between the 16th and the 84th percentile is the standard deviation of a
    # normal distribution, and no single hiccup decides it.
    low, high = np.quantile(ratios, [0.16, 0.84])
    return SliceCosts(
        slices=tuple(slices),
        run_s=float(medians[-1]),
        jitter=float((high - low) / 2),
        start_s=max(0.0, float(np.median(turns[0].cold_s) - np.median(decoded.sum(axis=1)))),
    )


def byte_and_fixed_s(
    whole_s: float, half: SliceTimes, narrow: SliceTimes, run_s: float, layer_bytes: float
) -> tuple[float, float, float]:
    """Seconds for each byte of a slice, and what is fixed in its attention, its feed-forward part.

    `whole_s` is for each byte of whole layers of `layer_bytes`. Both parts have one slope, and
    start where a line of that slope passes between their slices. A whole layer is measured best, so
    what is not fixed of it is what its bytes take.
    """
    slope_s = whole_s
    # Where not even a half of the columns is more than the narrow slice has, only heads tell them
    # apart, and a byte of those says nothing of a byte of columns.
    if half.feed_forward_bytes > narrow.feed_forward_bytes:
        slope_s = (half.seconds - narrow.seconds) / (half.nbytes - narrow.nbytes)
        slope_s = min(max(slope_s, _LEAST_PART * whole_s), MOST_OF_WHOLE * whole_s)
    both = (half, narrow)
    attention_s = mean(each.attention_s - slope_s * each.attention_bytes for each in both)
    feed_forward_s = mean(each.feed_forward_s - slope_s * each.feed_forward_bytes for each in both)
    attention_s, feed_forward_s = (max(each, run_s) for each in (attention_s, feed_forward_s))
    rest_s = max(whole_s - (attention_s + feed_forward_s) / layer_bytes, _LEAST_PART * whole_s)
    # Where a split stage computes a step in halves, a byte of it may take longer than of a whole.
    byte_s = slope_s if slope_s > whole_s else rest_s
    return byte_s, attention_s - run_s, feed_forward_s - run_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """Seconds of every graph, [turns, graphs]; the halves of a graph together."""

    half: NDArray[np.float64]
    narrow: NDArray[np.float64]
    cold_s: tuple[float, ...]
    """Steps of the half that began with cold caches."""


def _in_turn(
    site: Site, half: LoadedSample, narrow: LoadedSample, step: Step, caches: Caches
) -> _Turns:
    """Each right after the other, so that the kernels are in the caches and the weights are not."""
    for loaded in (half, narrow):
        loaded.seconds(step)  # makes bindings and buffers
    rows = step.batch * step.num_tokens
    halves: list[list[float]] = []
    narrows: list[list[float]] = []
    cold_s: list[float] = []
    begin_s = time.perf_counter()
    for turn in range(_TURNS if rows == 1 else _FEWER_TURNS):
        site.check()
        if rows > 1 and turn >= _FEWEST_TURNS and time.perf_counter() > begin_s + _SPAN_S:
            break
        cold_s.append(caches.cold_seconds(half, step))
        if not caches.matter(step):
            halves.append(half.runs.seconds)
        narrow.seconds(step)
        narrows.append(narrow.runs.seconds)
        if caches.matter(step):
            caches.cold_seconds(narrow, step)
            half.seconds(step)
            halves.append(half.runs.seconds)
    parts = 2 * half.sample.num_layers
    return _Turns(
        half=_whole_parts(halves, parts),
        narrow=_whole_parts(narrows, parts),
        cold_s=tuple(cold_s),
    )


def _whole_parts(turns: Sequence[Sequence[float]], parts: int) -> NDArray[np.float64]:
    """[turns, parts + 1]: `parts` parts, each of one run or of two halves, and the last graph."""
    runs = np.asarray(turns)
    split = runs[:, :-1].reshape(len(runs), parts, -1).sum(axis=2)
    return np.concatenate([split, runs[:, -1:]], axis=1)


def _slice_times(
    sample: Sample,
    width: Width,
    weight_format: WeightFormat,
    runs: NDArray[np.float64],
    head_s: float,
) -> SliceTimes:
    """Times of a layer in the mean; `head_s` is what reading the cache takes for each head.

    With the first attention a step begins: it is left out where there are more.
    """
    medians = np.median(runs, axis=0)
    attention = medians[0:-1:2]
    num_heads = sample.shard_heads(width, weight_format)
    attention_bytes, feed_forward_bytes = sample.part_bytes(width, weight_format)
    return SliceTimes(
        attention_bytes=attention_bytes,
        feed_forward_bytes=feed_forward_bytes,
        attention_s=float(attention[attention.size > 1 :].mean()) - head_s * num_heads,
        feed_forward_s=float(medians[1:-1:2].mean()),
    )
