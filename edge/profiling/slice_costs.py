"""Costs of layer slices on a peer: a part that is proportional to bytes, and a fixed part.

A layer that several peers share is two graphs on each of them, and each runs all operators of the
layer, however narrow its slice. Two slices separate the two parts: half of every layer and about an
eighth lie on a line that starts at the fixed cost. The rest of a whole layer's time is proportional
to its bytes. (One core, a layer of 11 MB: 470 us whole, 268 half, 115 an eighth. With the cost of
starting graphs alone, whole and half predict 93 for the eighth.)
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
"""Repeats of the step of one row, which matters most."""

_FEWER_TURNS = 6
_FEWEST_TURNS = 2
_SPAN_S = 1.0
"""Seconds for fewer repeats of slow steps."""

_LEAST_PART = 0.1
"""The least part of whole layers' time that is proportional to bytes; less is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTimes:
    """Times of one slice of a layer: its two graphs."""

    attention_bytes: int
    feed_forward_bytes: int
    attention_s: float
    """Seconds of attention without reading the KV cache."""
    feed_forward_s: float

    @property
    def nbytes(self) -> int:
        return self.attention_bytes + self.feed_forward_bytes

    @property
    def seconds(self) -> float:
        return self.attention_s + self.feed_forward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCosts:
    """Measurements of slices."""

    slices: tuple[tuple[SliceTimes, SliceTimes], ...]
    """Times of a half and a narrow slice, for each step."""
    run_s: float
    """Seconds of a graph that only adds two arrays."""
    jitter: float
    """Standard deviation of a run's time, relative to its mean."""
    start_s: float
    """Extra time of a step because its first data are in no cache."""


def slice_costs(
    site: Site,
    sample: Sample,
    weight_format: WeightFormat,
    caches: Caches,
    steps: Sequence[Step],
    attention_s: Sequence[float],
) -> SliceCosts:
    """Measure both slices in turn, in each of these steps, the first of which has one row.

    `attention_s`: for each step the seconds per row, cached token and query head.
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
    # Half the distance between the 16th and the 84th percentile is the standard deviation of a
    # normal distribution, and robust against single hiccups.
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
    """Seconds per byte of a slice, and the fixed parts of its attention and its feed-forward.

    `whole_s`: seconds per byte of whole layers of `layer_bytes`. Both parts have one slope; their
    fixed parts are where a line of that slope between their slices begins. Whole layers are
    measured best, so their bytes get all time that is not fixed.
    """
    slope_s = whole_s
    # If half of the columns is no more than the narrow slice has, only heads differ, and their
    # bytes tell nothing about a byte of columns.
    if half.feed_forward_bytes > narrow.feed_forward_bytes:
        slope_s = (half.seconds - narrow.seconds) / (half.nbytes - narrow.nbytes)
        slope_s = min(max(slope_s, _LEAST_PART * whole_s), MOST_OF_WHOLE * whole_s)
    both = (half, narrow)
    attention_s = mean(each.attention_s - slope_s * each.attention_bytes for each in both)
    feed_forward_s = mean(each.feed_forward_s - slope_s * each.feed_forward_bytes for each in both)
    attention_s, feed_forward_s = (max(each, run_s) for each in (attention_s, feed_forward_s))
    rest_s = max(whole_s - (attention_s + feed_forward_s) / layer_bytes, _LEAST_PART * whole_s)
    # In a split stage that computes a step in halves, a byte may take longer than in a whole one.
    byte_s = slope_s if slope_s > whole_s else rest_s
    return byte_s, attention_s - run_s, feed_forward_s - run_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """Seconds of every graph, [turns, graphs]; the halves of a graph are added."""

    half: NDArray[np.float64]
    narrow: NDArray[np.float64]
    cold_s: tuple[float, ...]
    """Seconds of steps of the half that began with cold caches."""


def _in_turn(
    site: Site, half: LoadedSample, narrow: LoadedSample, step: Step, caches: Caches
) -> _Turns:
    """Run both slices right after each other: kernels are in the caches, weights are not."""
    for loaded in (half, narrow):
        loaded.seconds(step)  # warm-up: makes bindings and buffers
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
    """Mean times of a layer. `head_s`: time of reading the KV cache, for each head.

    The first attention includes the start of the step. It is left out if there are more.
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
