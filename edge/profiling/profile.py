"""Profiling: a peer measures its speed for one model with real kernels, real shapes and a few
layers.

Every time is a median. Fixed costs (of a run, a slice's operators, a step), costs by bytes of
weights and costs by cached tokens are measured separately, so that a plan's cost can be composed of
them. Blocking; runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from edge.partition import ComputeRates
from edge.profiling.cold_caches import Caches
from edge.profiling.expert_costs import expert_seconds
from edge.profiling.loaded_sample import (
    EARLY_POSITION,
    Check,
    LoadedSample,
    Site,
    chunk_step,
    decode_step,
)
from edge.profiling.overheads import sample_seconds, step_seconds
from edge.profiling.sample import (
    CHUNK_ROWS,
    CONTEXT_TOKENS,
    REQUESTS,
    Sample,
    attention_sample,
    weights_sample,
)
from edge.profiling.slice_costs import byte_and_fixed_s, slice_costs
from edge.protocol.measurements import PeerProfile, Profile
from edge.protocol.step import Step

THIRD_SAMPLE = 0.1
"""If two samples differ by more, one was disturbed, and a third is taken."""

DISAGREEMENT = 0.3
"""If all three differ by more, the device is unsteady."""

_FEW_ROWS = (1, 4, REQUESTS)
_SPAN_S = 0.07
_LONGEST_SPAN_S = 0.5
_LEAST_REPEATS = 6
_MOST_REPEATS = 20
_LONGEST_CHUNK_S = 1.5
_ATTENTION_REPEATS = 5
_BRIEF_REPEATS = 3


def profile(site: Site, order: Profile, *, busy: tuple[str, ...]) -> PeerProfile:
    """The peer's rates for the model.

    Raises CapacityError if the narrowest sample exceeds the budget.
    """
    weight_format = order.weight_format
    caches = Caches(site.budget_bytes)
    sample = weights_sample(order.model, weight_format, site.budget_bytes - caches.nbytes)
    is_rough = order.is_brief or site.backend.is_stand_in
    expert_s = None if is_rough else expert_seconds(site, order, caches)
    with contextlib.ExitStack() as stack:
        loaded = LoadedSample(site, sample, "whole", weight_format)
        stack.callback(loaded.close)
        if is_rough:
            return _roughly(site, order, loaded, caches, busy=busy)
        steps = _steps(loaded)

        of_one_row: list[float] = []

        def step_times() -> list[float]:
            samples = [_times(loaded, step, site.check, caches) for step in steps]
            of_one_row.extend(samples[0])
            return [statistics.median(sample) for sample in samples]

        # Samples are apart in time, so that a disturbance of seconds affects only one.
        early = step_times()
        decode_attention_s, chunk_attention_s = _attention(site, order, caches)
        attention_s = tuple(
            chunk_attention_s if step.num_tokens > 1 else decode_attention_s for step in steps
        )
        slices = slice_costs(site, sample, weight_format, caches, steps, attention_s)
        sample_s = sample_seconds(order.model.vocab_size, caches)
        stepping_s = step_seconds(site.backend, order.model, weight_format, site.folder, caches)
        times, spread, is_unsteady = agreed(early, step_times)
        rows = tuple(step.batch * step.num_tokens for step in steps)
        heads = sample.num_heads
        fixed_s = tuple(
            slices.run_s
            + (slices.start_s if caches.matter(step) else 0.0)
            + each * heads * step.batch * step.num_tokens * step.entries[0].end
            for step, each in zip(steps, attention_s, strict=True)
        )
        seconds_per_byte = tuple(
            _less(seconds, fixed) / loaded.nbytes
            for seconds, fixed in zip(times, fixed_s, strict=True)
        )
        slice_s = [
            byte_and_fixed_s(each_s, *pair, slices.run_s, loaded.nbytes / sample.num_layers)
            for each_s, pair in zip(seconds_per_byte, slices.slices, strict=True)
        ]
        rates = ComputeRates(
            rows=rows,
            seconds_per_byte=seconds_per_byte,
            shared_seconds_per_byte=seconds_per_byte,
            slice_seconds_per_byte=tuple(each[0] for each in slice_s),
            attention_slice_s=tuple(each[1] for each in slice_s),
            feed_forward_slice_s=tuple(each[2] for each in slice_s),
            attention_s=attention_s,
            run_s=slices.run_s,
            expert_s=None if expert_s is None else max(expert_s, slices.run_s),
            jitter=slices.jitter,
            sample_s=sample_s,
            step_s=_less(stepping_s, slices.run_s),
            disk_bytes_per_s=site.disk_bytes_per_s,
            copy_bytes_per_s=site.backend.copy_bytes_per_s(),
            spread=spread_of(of_one_row),
        )
    return PeerProfile(
        rates=rates,
        sample_bytes=loaded.nbytes,
        sample=in_words(sample),
        spread=spread,
        is_unsteady=is_unsteady,
        busy=busy,
    )


def _roughly(
    site: Site, order: Profile, loaded: LoadedSample, caches: Caches, *, busy: tuple[str, ...]
) -> PeerProfile:
    """Rough rates by two kinds of steps: a first look, or at a stand-in, on which more would take
    minutes."""
    steps = (decode_step(1), chunk_step(REQUESTS))
    is_stand_in = site.backend.is_stand_in
    seconds_per_byte = tuple(
        _a_few(loaded, step, 0 if is_stand_in else _BRIEF_REPEATS) / loaded.nbytes for step in steps
    )
    rates = ComputeRates(
        rows=(1, REQUESTS),
        seconds_per_byte=seconds_per_byte,
        shared_seconds_per_byte=seconds_per_byte,
        slice_seconds_per_byte=seconds_per_byte,
        attention_slice_s=(0.0, 0.0),
        feed_forward_slice_s=(0.0, 0.0),
        attention_s=(0.0, 0.0),
        run_s=0.0,
        jitter=0.0,
        sample_s=sample_seconds(order.model.vocab_size, caches),
        step_s=0.0,
        disk_bytes_per_s=site.disk_bytes_per_s,
        copy_bytes_per_s=site.backend.copy_bytes_per_s(),
    )
    return PeerProfile(
        rates=rates,
        sample_bytes=loaded.nbytes,
        sample=f"{in_words(loaded.sample)}, roughly: "
        + ("it stands in for a device that is not here" if is_stand_in else "by a short look"),
        spread=0.0,
        is_unsteady=False,
        busy=busy,
    )


def _a_few(loaded: LoadedSample, step: Step, more: int) -> float:
    """The median of a few runs after the first one, which makes buffers; or the first one's."""
    first_s = loaded.seconds(step)
    return statistics.median([loaded.seconds(step) for _ in range(more)] or [first_s])


def in_words(sample: Sample) -> str:
    """Description of a sample, for display."""
    if sample.is_narrowed:
        layer = sample.spec.kinds[0]
        return (
            f"a part of one layer ({layer.mixer.num_units} heads, {layer.feed_forward.columns} ffn "
            "columns): a whole one does not fit into a quarter of the free memory"
        )
    return f"{sample.num_layers} layer{'s' if sample.num_layers > 1 else ''}"


def agreed(
    early: Sequence[float], measure: Callable[[], Sequence[float]]
) -> tuple[tuple[float, ...], float, bool]:
    """Medians of two samples of several times, or of three if two disagree in any of them.

    early: the first sample. Also returns the largest spread of samples (slowest over fastest, minus
    1), and whether no two of three samples agreed.
    """
    samples = [early, measure()]
    if any(_apart(pair) > THIRD_SAMPLE for pair in zip(*samples, strict=True)):
        samples.append(measure())
    columns = list(zip(*samples, strict=True))
    medians = tuple(statistics.median(column) for column in columns)
    closest = [min(map(_apart, pairwise(s))) for s in map(sorted, columns)]
    return medians, max(map(_apart, columns)), max(closest) > DISAGREEMENT


def _apart(times: Sequence[float]) -> float:
    return max(times) / max(min(times), 1e-12) - 1


def spread_of(seconds: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile over the median."""
    low, middle, high = np.percentile(seconds, [20, 50, 80])
    return float(low / middle), float(high / middle)


def _less(seconds: float, fixed_s: float) -> float:
    """A time minus its fixed part; at least a tenth of it, because both have noise."""
    return max(seconds - fixed_s, 0.1 * seconds)


def _steps(loaded: LoadedSample) -> tuple[Step, ...]:
    """One row, a few, many of several requests, and a chunk of at most 1.5 s.

    There is always a chunk, since its share of attention differs from other steps.
    """
    few = tuple(decode_step(rows) for rows in _FEW_ROWS)
    for step in few:
        loaded.seconds(step)  # warm-up: makes bindings and buffers
    row_s = loaded.seconds(few[-1]) / REQUESTS
    possible = [rows for rows in CHUNK_ROWS if rows <= loaded.sample.chunk_rows]
    quick = [rows for rows in possible if row_s * rows <= _LONGEST_CHUNK_S]
    shortest = min((rows for rows in possible if rows > REQUESTS), default=REQUESTS)
    chunk = chunk_step(max([shortest, *quick]))
    loaded.seconds(chunk)
    return (*few[: -1 if chunk.num_tokens == REQUESTS else None], chunk)


def _times(loaded: LoadedSample, step: Step, check: Check, caches: Caches) -> list[float]:
    """Seconds of each repeat: those that fit in a short span, at least a few."""
    check()
    begin_s = time.perf_counter()
    seconds = [caches.cold_seconds(loaded, step)]
    span_s = max(_SPAN_S, min(_LEAST_REPEATS * seconds[0], _LONGEST_SPAN_S))
    while time.perf_counter() < begin_s + span_s and len(seconds) < _MOST_REPEATS:
        seconds.append(caches.cold_seconds(loaded, step))
    return seconds


def _attention(site: Site, order: Profile, caches: Caches) -> tuple[float, float]:
    """Seconds per row, cached token and query head: for decoding, and for a chunk."""
    sample = attention_sample(order.model, order.weight_format, site.budget_bytes)
    loaded = LoadedSample(site, sample, "whole", order.weight_format)
    rows, heads = sample.chunk_rows, sample.num_heads

    def median(step: Step, *, is_cold: bool) -> float:
        seconds = []
        for _ in range(_ATTENTION_REPEATS):
            if is_cold:
                caches.forget()
            seconds.append(loaded.seconds(step))
        return statistics.median(seconds)

    try:
        for start in range(0, CONTEXT_TOKENS, rows):
            site.check()
            loaded.seconds(chunk_step(rows, start))  # fills the cache that is attended to below
        last = CONTEXT_TOKENS - rows
        late_s = median(chunk_step(rows, last), is_cold=False)
        chunk_s = late_s - median(chunk_step(rows, 0), is_cold=False)
        late_s = median(decode_step(1, CONTEXT_TOKENS - 1), is_cold=True)
        decode_s = late_s - median(decode_step(1), is_cold=True)
    finally:
        loaded.close()
    tokens = CONTEXT_TOKENS - 1 - EARLY_POSITION
    return max(0.0, decode_s / (heads * tokens)), max(0.0, chunk_s / (heads * rows * last))
