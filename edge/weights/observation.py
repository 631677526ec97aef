"""Statistics of a model's inputs over a text, to round its weights by. Pure.

For inputs x of a matrix this is the Gram matrix, the sum over tokens of x times x transposed. Whole
Gram matrices would take more memory than the weights, so only products within runs of columns are
summed. KL of SmolLM2-135M in 4 bits: 0.0498 with whole ones, 0.0523 with runs of 512, 0.0546 with
runs of 256, and 0.091 without. For experts, tokens of each are counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edge.models.experts import Experts
from edge.weights.layout import ShardLayout

RUN_COLUMNS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Neighbouring inputs of one of a shard's matrices."""

    matrix: str
    """Name in ShardLayout, where fused matrices share their inputs."""
    columns: range
    """Columns of the whole matrix."""
    first: int
    """Index of the first column among the shard's columns."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its Gram matrix, which is float32."""
        return len(self.columns), len(self.columns)

    @property
    def nbytes(self) -> int:
        return len(self.columns) ** 2 * np.dtype(np.float32).itemsize

    @property
    def inputs(self) -> slice:
        """Slice of the product's inputs."""
        return slice(self.first, self.first + len(self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedExperts:
    """Token counts of a layer's experts, in the order of their places."""

    layer: int
    num_experts: int

    @property
    def shape(self) -> tuple[int]:
        """Shape of the counts, which are float32: exact up to 16 million."""
        return (self.num_experts,)

    @property
    def nbytes(self) -> int:
        return self.num_experts * np.dtype(np.float32).itemsize


Observed = ObservedRun | ObservedExperts


def observed_runs(layout: ShardLayout) -> tuple[Observed, ...]:
    """The observations of a shard: layers with experts, or all inputs of a model without any."""
    if not layout.of_experts:
        return observed_inputs(layout)
    local = ((number, layout.layer(number).feed_forward) for number in layout.layers)
    return tuple(
        ObservedExperts(layer=number, num_experts=part.num_experts)
        for number, part in local
        if isinstance(part, Experts)
    )


def observed_inputs(layout: ShardLayout) -> tuple[ObservedRun, ...]:
    """Runs of all matrices of a shard, in their order. They begin at multiples of their length."""
    return tuple(
        ObservedRun(matrix=matrix.name, columns=columns, first=columns.start - matrix.columns.start)
        for matrix in layout.matrices
        if matrix.is_observed
        for columns in _runs(matrix.columns)
    )


def observed_bytes(layout: ShardLayout) -> int:
    return sum(run.nbytes for run in observed_runs(layout))


def _runs(columns: range) -> Iterator[range]:
    start = columns.start
    while start < columns.stop:
        stop = min(columns.stop, (start // RUN_COLUMNS + 1) * RUN_COLUMNS)
        yield range(start, stop)
        start = stop
