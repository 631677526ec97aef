"""A checkpoint's matrices, rounded by statistics of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_blocks import calibrated as blocks
from edge.kernels.matmul_blocks.reference import parts_of, row_blocks
from edge.kernels.matmul_nbits import calibrated as packed
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, stacked
from edge.weights.block_matrices import Blocks
from edge.weights.block_rounding import largest_weight
from edge.weights.checkpoint import Checkpoint
from edge.weights.file_blocks import FileBlocks
from edge.weights.input_statistics import InputStatistics
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.weight_limits import check_weights, largest_of

_CHUNK_WEIGHTS = 1 << 24
"""Weights that are rounded at once, which takes about ten bytes each."""

Codes = QuantizedMatrix | NDArray[np.uint8]
"""A matrix in blocks, or `row_blocks` of a type of GGUF files."""


def rounded_matrix(
    checkpoint: Checkpoint,
    statistics: InputStatistics,
    role: str,
    kind: Blocks | FileBlocks,
    on_weights: Callable[[int], None],
) -> Codes:
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
            part = rounded(weight, kind, grams, lambda count: on_weights(count * columns))
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be rounded by {statistics.path}: {error}",
                remedy="remove that file, so that the statistics are made again",
            ) from error
        if isinstance(kind, FileBlocks) and not isinstance(part, QuantizedMatrix):
            largest = largest_weight(kind.form, parts_of(kind.form, part))
            if not np.isfinite(largest):
                raise CheckpointError(
                    f"tensor {name} has weights that are too large for {kind.words}",
                    remedy="pack them: --compressed-tensors, packs_blocks in Python",
                )
        parts.append(part)
    if isinstance(kind, FileBlocks):
        return np.concatenate([part for part in parts if not isinstance(part, QuantizedMatrix)])
    return stacked([part for part in parts if isinstance(part, QuantizedMatrix)])


def rounded(
    weight: NDArray[np.float32],
    kind: Blocks | FileBlocks,
    grams: Sequence[NDArray[np.float32]],
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> Codes:
    """Weights [rows, columns] rounded by x^T x of their inputs. Raises ValueError."""
    if isinstance(kind, FileBlocks):
        form = kind.form
        return row_blocks(form, blocks.quantize_calibrated(form, weight, grams, on_rows=on_rows))
    return packed.quantize_calibrated(
        weight,
        grams,
        bits=kind.bits,
        block_size=kind.block_size,
        zero_points=kind.zero_points,
        on_rows=on_rows,
    )
