"""Dividing equal pieces so that the slowest device is as fast as possible, in two kinds of step.

A stage waits for its slowest shard, both in a decoding step and in a step with a chunk of a prompt.
The ratio of the two times differs between devices. So there is no single best split, but a frontier
of splits of which none is better than another in both times. Knows numbers only.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TypeVar

Way = TypeVar("Way")

_THINNED_TO = 16
"""Points that are kept of a frontier over many pieces."""

_ALL_POINTS_UP_TO = 64
"""Up to this number of pieces, every point of the frontier is found."""

_NEARLY_ONE = 1 - 1e-9
"""Times whose ratio is above this are equal; the difference is rounding."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds for n pieces on one device: base + n * each, but `idle_s` for none."""

    base_s: float
    each_s: float
    idle_s: float
    """At most the base."""

    def of(self, count: int) -> float:
        return self.base_s + count * self.each_s if count else self.idle_s

    def most(self, bound_s: float, cap: int) -> int:
        """The most pieces, up to `cap`, that cost at most `bound_s`; -1 when none do."""
        if self.of(cap) <= bound_s:
            return cap
        if self.of(0) > bound_s:
            return -1
        count = min(cap, max(0, int((bound_s - self.base_s) / self.each_s))) if self.each_s else 0
        while count < cap and self.of(count + 1) <= bound_s:
            count += 1
        while count and self.of(count) > bound_s:
            count -= 1
        return count


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide the pieces, and the time of the slowest device in each kind of step."""

    decode_s: float
    chunk_s: float
    counts: tuple[int, ...]


def least_maximum(
    total: int, costs: Sequence[Cost], caps: Sequence[int], least: Sequence[int]
) -> tuple[int, ...] | None:
    """Counts that add up to `total`, least <= count <= cap, with the smallest largest cost.

    Every piece goes to the device that is fastest with it. This is optimal for a maximum of rising
    costs (Ibaraki and Katoh, Resource Allocation Problems, 1988, chapter 5). Bisection over the
    largest cost places all but a few pieces at once. None when the limits allow no counts.
    """
    if any(low > cap for low, cap in zip(least, caps, strict=True)):
        return None
    if not sum(least) <= total <= sum(caps):
        return None
    if sum(caps) == total:
        return tuple(caps)
    counts = list(least)
    low_s = 0.0
    high_s = max(cost.of(cap) for cost, cap in zip(costs, caps, strict=True))
    for _ in range(40):
        middle_s = (low_s + high_s) / 2
        trial = [
            max(low, cost.most(middle_s, cap))
            for cost, cap, low in zip(costs, caps, least, strict=True)
        ]
        if sum(trial) <= total:
            counts, low_s = trial, middle_s
            if total - sum(trial) <= len(trial):
                break
        else:
            high_s = middle_s
    bids = [
        (costs[index].of(count + 1), index)
        for index, count in enumerate(counts)
        if count < caps[index]
    ]
    heapq.heapify(bids)
    for _ in range(total - sum(counts)):
        _, index = heapq.heappop(bids)
        counts[index] += 1
        if counts[index] < caps[index]:
            heapq.heappush(bids, (costs[index].of(counts[index] + 1), index))
    return tuple(counts)


def frontier(
    total: int,
    decode: Sequence[Cost],
    chunk: Sequence[Cost],
    caps: Sequence[int],
    least: Sequence[int],
) -> list[Split]:
    """The ways to divide `total` pieces that no other way beats in both kinds of step.

    Finds the points from one end: first the fastest to decode, then the fastest to decode with a
    shorter time of a chunk than the point before, and so on. Complete up to `_ALL_POINTS_UP_TO`
    pieces; above, thinned to about `_THINNED_TO` points with both ends.
    """
    found: list[Split] = []
    bounded = list(caps)
    step_s = 0.0
    while True:
        counts = least_maximum(total, decode, bounded, least)
        if counts is None:
            return found
        decode_s = _largest(decode, counts)
        within = [
            min(cap, max(low, cost.most(decode_s, cap)))
            for cost, cap, low in zip(decode, bounded, least, strict=True)
        ]
        counts = least_maximum(total, chunk, within, least) or counts
        chunk_s = _largest(chunk, counts)
        found.append(Split(_largest(decode, counts), chunk_s, counts))
        if total > _ALL_POINTS_UP_TO and len(found) == 1:
            fastest = least_maximum(total, chunk, caps, least)
            assert fastest is not None
            step_s = (chunk_s - _largest(chunk, fastest)) / _THINNED_TO
        bound_s = min(chunk_s * _NEARLY_ONE, chunk_s - step_s)
        bounded = [cost.most(bound_s, cap) for cost, cap in zip(chunk, caps, strict=True)]


def all_splits(
    total: int, decode: Sequence[Cost], chunk: Sequence[Cost], caps: Sequence[int], *, most: int
) -> list[Split] | None:
    """Every way to divide `total` pieces within the caps, or None where there may be more than
    `most`."""
    every = compositions(total, len(caps), most=most)
    if every is None:
        return None
    return [
        Split(_largest(decode, counts), _largest(chunk, counts), counts)
        for counts in every
        if all(count <= cap for count, cap in zip(counts, caps, strict=True))
    ]


def compositions(total: int, parts: int, *, most: int) -> list[tuple[int, ...]] | None:
    """Every way to write `total` as a sum of `parts` counts, or None for more than `most` ways."""
    if math.comb(total + parts - 1, parts - 1) > most:
        return None
    found: list[tuple[int, ...]] = []
    for bars in combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        found.append(tuple(right - left - 1 for left, right in pairwise(edges)))
    return found


def thinned(ways: Sequence[Way], most: int) -> list[Way]:
    """All of `ways`, or `most` (two or more) of them, evenly spaced, with the first and the
    last."""
    last = len(ways) - 1
    if last < most:
        return list(ways)
    return [ways[index * last // (most - 1)] for index in range(most)]


def _largest(costs: Sequence[Cost], counts: Sequence[int]) -> float:
    return max(cost.of(count) for cost, count in zip(costs, counts, strict=True))
