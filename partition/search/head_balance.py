"""Dividing query heads. Their KV heads make them unequal pieces.

A shard whose heads straddle a group holds that KV head, too (see `kv_heads`). So the cost of heads
depends on where they start: dynamic programming over the cuts, in rank order.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from edge.partition.fit.memory import units_that_fit
from edge.partition.plan.ranges import kv_group_size
from edge.partition.search.balance import Cost, Split, compositions, least_maximum, thinned

_Label = tuple[float, float, int, int]

_LABELS_PER_CUT = 4
"""Points of the frontier that are kept at each cut, for many heads."""

_ALL_LABELS_UP_TO = 16
"""Up to this number of heads, every point is kept."""


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Seconds (or bytes) for heads on one device: base + heads * each + KV heads * each_kv, but
    `idle_s` for none."""

    base_s: float
    head_s: float
    kv_head_s: float
    idle_s: float
    """At most the base."""

    @property
    def line(self) -> tuple[float, float, float]:
        return self.base_s, self.head_s, self.kv_head_s

    def of(self, heads: int, kv_heads: int) -> float:
        if not heads:
            return self.idle_s
        return self.base_s + heads * self.head_s + kv_heads * self.kv_head_s


@lru_cache(maxsize=16)
def kv_counts(num_heads: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """[start][count] -> KV heads that a shard with these heads holds."""

    def local(start: int, count: int) -> int:
        size = kv_group_size(range(start, start + count), num_heads, num_kv_heads)
        return count // size if size else 0

    return tuple(
        tuple(local(start, count) for count in range(num_heads - start + 1))
        for start in range(num_heads + 1)
    )


def head_frontier(
    table: Sequence[Sequence[int]],
    decode: Sequence[HeadCost],
    chunk: Sequence[HeadCost],
    nbytes: HeadCost,
    rooms: Sequence[float],
    *,
    frugal: bool = False,
) -> list[Split]:
    """The ways to cut the heads of `kv_counts` within the rooms that no other beats in both steps.

    nbytes: bytes that heads take of a room. frugal: one way with the fewest bytes in all instead,
    for tight memory. Empty when the rooms are too small.
    """
    num_heads = len(table) - 1
    known = None if frugal else _plain(table, decode, chunk, nbytes, rooms)
    limit_s, chunk_limit_s = (known.decode_s, known.chunk_s) if known else (math.inf, math.inf)
    keep = 1 if frugal else sys.maxsize if num_heads <= _ALL_LABELS_UP_TO else _LABELS_PER_CUT
    # A label: (key, second key, start of the last device's heads, index of its label there).
    reached: dict[int, list[_Label]] = {0: [(0.0, 0.0, -1, -1)]}
    history = [reached]
    for rank, room in enumerate(rooms):
        is_last = rank == len(rooms) - 1
        base_s, head_s, kv_s = decode[rank].line
        chunk_base_s, chunk_head_s, chunk_kv_s = chunk[rank].line
        found: dict[int, list[_Label]] = {}
        for start, labels in reached.items():
            kv_row = table[start]
            for count in range(num_heads - start if is_last else 0, num_heads - start + 1):
                decode_s = base_s + count * head_s if count else decode[rank].idle_s
                chunk_s = chunk_base_s + count * chunk_head_s if count else chunk[rank].idle_s
                if decode_s > limit_s and chunk_s > chunk_limit_s:
                    break  # so are all larger counts, with or without KV heads
                kv_heads = kv_row[count]
                decode_s += kv_heads * kv_s
                chunk_s += kv_heads * chunk_kv_s
                size = nbytes.of(count, kv_heads)
                if size > room or (decode_s > limit_s and chunk_s > chunk_limit_s):
                    continue
                into = found.setdefault(start + count, [])
                for index, (first, second, _, _) in enumerate(labels):
                    if frugal:
                        into.append((first + size, max(second, decode_s), start, index))
                    else:
                        into.append((max(first, decode_s), max(second, chunk_s), start, index))
        reached = {stop: _undominated(labels, keep) for stop, labels in found.items()}
        history.append(reached)
    splits: list[Split] = []
    for label in reached.get(num_heads, []):
        counts: list[int] = []
        stop, here = num_heads, label
        for before in reversed(history[:-1]):
            counts.append(stop - here[2])
            stop, here = here[2], before[here[2]][here[3]]
        splits.append(measured(counts[::-1], table, decode, chunk))
    return splits


def all_head_splits(
    table: Sequence[Sequence[int]],
    decode: Sequence[HeadCost],
    chunk: Sequence[HeadCost],
    *,
    most: int,
) -> list[Split] | None:
    """Every way to cut the heads, or None where there are more than `most`."""
    every = compositions(len(table) - 1, len(decode), most=most)
    if every is None:
        return None
    return [measured(counts, table, decode, chunk) for counts in every]


def kv_of(counts: Sequence[int], table: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """KV heads of each device, when heads are cut into these counts in order."""
    held: list[int] = []
    start = 0
    for count in counts:
        held.append(table[start][count])
        start += count
    return tuple(held)


def measured(
    counts: Sequence[int],
    table: Sequence[Sequence[int]],
    decode: Sequence[HeadCost],
    chunk: Sequence[HeadCost],
) -> Split:
    """The split into these counts, with its times."""
    pairs = list(zip(counts, kv_of(counts, table), strict=True))
    return Split(
        max(cost.of(*pair) for cost, pair in zip(decode, pairs, strict=True)),
        max(cost.of(*pair) for cost, pair in zip(chunk, pairs, strict=True)),
        tuple(counts),
    )


def _plain(
    table: Sequence[Sequence[int]],
    decode: Sequence[HeadCost],
    chunk: Sequence[HeadCost],
    nbytes: HeadCost,
    rooms: Sequence[float],
) -> Split | None:
    """A split that fits, found quickly as if every head had its own KV head; None if that finds
    none.

    A split that is slower than this one in both kinds of step is not on the frontier.
    """
    num_heads = len(table) - 1
    head_bytes = nbytes.head_s + nbytes.kv_head_s
    caps = [
        units_that_fit(math.floor(room - nbytes.base_s), math.ceil(head_bytes), num_heads)
        for room in rooms
    ]
    costs = [Cost(cost.base_s, cost.head_s + cost.kv_head_s, cost.idle_s) for cost in decode]
    counts = least_maximum(num_heads, costs, caps, [0] * len(caps))
    return None if counts is None else measured(counts, table, decode, chunk)


def _undominated(labels: list[_Label], keep: int) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept[:1] if keep == 1 else thinned(kept, keep)
