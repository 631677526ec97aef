"""Statistics of a model's inputs over a text, to round its weights by. Pure.

Of inputs x of a matrix: the sum over tokens of x times x transposed, its Gram matrix. Whole ones
would take more memory than the weights, so columns are taken in runs, and only products within a
run are summed. SmolLM2-135M in 4 bits by whole ones: KL 0.0498; by runs of 512: 0.0523; of 256:
0.0546; without: 0.091. For experts, tokens through each of them are counted instead.
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
    """As ShardLayout names it: fused matrices have the same inputs."""
    columns: range
    """Columns of the whole matrix."""
    first: int
    """The first one, among the shard's columns."""

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
    """How many tokens go through each of a layer's experts, in the order of their places."""

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
    """What is observed of a shard: of a model with experts the layers that have some, of any other
    all inputs."""
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
