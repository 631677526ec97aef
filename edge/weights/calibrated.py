"""A checkpoint's matrices, rounded by statistics of their inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.errors import CheckpointError
from edge.kernels.matmul_nbits.calibrated import quantize_calibrated
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, stacked
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.input_statistics import InputStatistics
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.weight_limits import check_weights, largest_of

_CHUNK_WEIGHTS = 1 << 24
"""Weights that are rounded at once, which takes about ten bytes each."""


def rounded_matrix(
    checkpoint: Checkpoint,
    statistics: InputStatistics,
    role: str,
    kind: Blocks,
    on_weights: Callable[[int], None],
) -> QuantizedMatrix:
    """The matrix of a role, rounded. on_weights: called with the number of rounded weights; may
    raise.

    Raises CheckpointError for invalid weights, and statistics without inputs.
    """
    name = checkpoint.tensor_name(role)
    rows, columns = checkpoint.store.shape(name)
    grams = statistics.grams(role)
    step = max(1, _CHUNK_WEIGHTS // columns)
    parts = []
    for start in range(0, rows, step):
        some = range(start, min(start + step, rows))
        with store_errors_as_edge_errors():
            weight = checkpoint.store.read(name, rows=some)
        weight = weight.astype(np.float32, copy=False)
        check_weights(checkpoint.store, name, largest_of(weight))
        try:
            part = quantize_calibrated(
                weight,
                grams,
                bits=kind.bits,
                block_size=kind.block_size,
                zero_points=kind.zero_points,
                on_rows=lambda count: on_weights(count * columns),
            )
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be rounded by {statistics.path}: {error}",
                remedy="remove that file, so that the statistics are made again",
            ) from error
        parts.append(part)
    return stacked(parts)
