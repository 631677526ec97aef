"""How fast one device computes one model, as it measured itself.

Numbers, and interpolation between them; the measuring is elsewhere. Every wrong number is a
ValueError at construction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import mul
from statistics import median
from typing import Any

MOST_POINTS = 64
"""The most entries of `rows`."""

LARGEST_ROWS = 2**20
"""The most rows of a step."""


_BY_ROWS = (
    "seconds_per_byte", "shared_seconds_per_byte", "slice_seconds_per_byte", "attention_slice_s",
    "feed_forward_slice_s", "attention_s",
)  # fmt: skip
"""Fields with one entry for each of `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRates:
    """What one device measured for the shapes of one model in one weight format."""

    rows: tuple[int, ...]
    """Rows (tokens) of a step at which the sequences below were measured; ascending from 1."""
    seconds_per_byte: tuple[float, ...]
    """Seconds of a step of each of `rows` through whole layers, per byte of weights as ModelFacts
    counts them, while no other peer of its host computes."""
    shared_seconds_per_byte: tuple[float, ...]
    """The same, while the other peers of its host compute, too."""
    slice_seconds_per_byte: tuple[float, ...]
    """Seconds per further byte of a slice of a layer, or of a single product. Less than for whole
    layers, whose time per byte includes fixed costs."""
    attention_slice_s: tuple[float, ...]
    """Fixed seconds of the attention of a slice of a layer, beyond its bytes and the run of its
    graph: its operators, however few heads it has."""
    feed_forward_slice_s: tuple[float, ...]
    """The same for the feed-forward block, however few columns it has."""
    attention_s: tuple[float, ...]
    """Seconds per row, cached token and query head, in a step of each of `rows`."""
    run_s: float
    """Seconds of one run of a nearly empty graph."""
    jitter: float
    """Standard deviation of the time of one run, divided by its mean."""
    sample_s: float
    """Seconds to choose one token from the whole vocabulary."""
    step_s: float
    """Fixed seconds of a step beyond its runs: its queue, bindings, and reporting the token."""
    expert_s: float | None = None
    """Seconds that an expert takes longer for one token when it is a graph of its own from the
    expert cache than when all experts of its layer stay in memory. Disk time is not included. None:
    not measured."""
    disk_bytes_per_s: float | None = None
    """Sequential reading; None when not measured."""
    copy_bytes_per_s: float | None = None
    """From host memory into device memory; None where they are the same memory, or not measured."""
    spread: tuple[float, float] = (1.0, 1.0)
    """(20th, 80th) percentile of the time of a step of one row, divided by the median."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.rows) <= MOST_POINTS:
            raise ValueError(
                f"rates need 1 to {MOST_POINTS} entries in rows, not {self.rows!r:.80}."
            )
        if any(type(row) is not int for row in self.rows):
            raise ValueError(f"rows of rates must be whole numbers, not {self.rows!r:.80}.")
        if self.rows[0] != 1 or any(low >= high for low, high in pairwise(self.rows)):
            raise ValueError(f"rows of rates must ascend from 1, not {self.rows!r:.80}.")
        if self.rows[-1] > LARGEST_ROWS:
            raise ValueError(f"rows of rates must be at most {LARGEST_ROWS:,}.")
        for name in _BY_ROWS:
            values = getattr(self, name)
            if len(values) != len(self.rows):
                raise ValueError(
                    f"{name} of rates has {len(values)} entries, rows has {len(self.rows)}."
                )
            for value in values:
                _require_seconds(name, value)
        for name in ("run_s", "jitter", "sample_s", "step_s"):
            _require_seconds(name, getattr(self, name))
        if self.expert_s is not None:
            _require_seconds("expert_s", self.expert_s)
        for name in ("disk_bytes_per_s", "copy_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} of rates must be more than 0, not {rate}.")

        if len(self.spread) != 2 or not 0 < self.spread[0] <= 1 <= self.spread[1] < math.inf:
            raise ValueError(
                f"spread of rates must be on both sides of 1, not {self.spread!r:.80}."
            )

    def weights_s(self, rows: float, *, shared: bool) -> float:
        """Seconds per byte of weights in a step of `rows` rows (at least 1)."""
        times = self.shared_seconds_per_byte if shared else self.seconds_per_byte
        return between(self.rows, times, rows)

    def slice_weights_s(self, rows: float) -> float:
        """Seconds per byte of a slice of a layer in a step of `rows` rows, no neighbour at work."""
        return between(self.rows, self.slice_seconds_per_byte, rows)

    def slice_fixed_s(self, rows: float) -> tuple[float, float]:
        """Fixed seconds of a slice of a layer, beyond its bytes and runs: (attention,
        feed-forward)."""
        return (
            between(self.rows, self.attention_slice_s, rows),
            between(self.rows, self.feed_forward_slice_s, rows),
        )

    def attention_draft_s(self, rows: float) -> float:
        """The same of a step whose rows are one request's. Each row but the first takes what it
        takes in the longest step measured, a chunk of a prompt: keys and values are read once."""
        return self.attention_s[0] + (rows - 1) * self.attention_s[-1]

    def attention_step_s(self, rows: float) -> float:
        """Seconds per cached token and query head in a step of `rows` rows (at least 1)."""
        times = [each * count for each, count in zip(self.attention_s, self.rows, strict=True)]
        return between(self.rows, times, rows)

    @classmethod
    def median(cls, several: Sequence["ComputeRates"]) -> "ComputeRates":
        """The median of what equal devices measured, all with the same `rows`.

        The spread of the result covers the differences between them.
        """

        def middle(name: str) -> Any:
            values = [getattr(each, name) for each in several]
            if isinstance(values[0], tuple):
                return tuple(map(median, zip(*values, strict=True)))
            known = [each for each in values if each is not None]
            return median(known) if known else None

        found = cls(
            rows=several[0].rows,
            **{field.name: middle(field.name) for field in fields(cls) if field.name != "rows"},
        )
        ratios = [each.seconds_per_byte[0] / found.seconds_per_byte[0] for each in several]
        low, high = found.spread
        return replace(found, spread=(min(low, *ratios), max(high, *ratios)))

    def at_pace(self, rows: Sequence[int], times: Sequence[float]) -> "ComputeRates":
        """These rates, slowed down: a step of `rows[i]` takes `times[i]` as long. Attention per
        token is not changed."""
        factors = [between(rows, times, min(each, rows[-1])) for each in self.rows]
        scaled: dict[str, Any] = {
            name: tuple(map(mul, getattr(self, name), factors))
            for name in _BY_ROWS
            if name != "attention_s"
        }
        return replace(self, **scaled)

    def slowed_by(self, factor: float) -> "ComputeRates":
        """These rates, if all computing takes `factor` times as long."""
        scaled: dict[str, Any] = {
            name: tuple(factor * each for each in getattr(self, name)) for name in _BY_ROWS
        }
        scaled |= {name: factor * getattr(self, name) for name in ("run_s", "sample_s", "step_s")}
        expert_s = None if self.expert_s is None else factor * self.expert_s
        return replace(self, expert_s=expert_s, **scaled)


def between(rows: Sequence[int], times: Sequence[float], at: float) -> float:
    """The time of a step of `at` rows: linear between two points, and beyond the last with its
    slope.

    A falling last slope is noise and counts as flat. With one point, the time grows in proportion
    to the rows.
    """
    if len(rows) == 1:
        return times[0] * at
    last = len(rows) - 1
    right = next((index for index in range(1, last) if at <= rows[index]), last)
    left = right - 1
    slope = (times[right] - times[left]) / (rows[right] - rows[left])
    if at > rows[last]:
        return times[last] + max(0.0, slope) * (at - rows[last])
    return times[left] + slope * (at - rows[left])


def _require_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} of rates must be finite and 0 or more, not {value}.")
