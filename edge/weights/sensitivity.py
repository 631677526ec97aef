"""What each kind of matrix would cost a model in quality, matrix by matrix, by its statistics.

Of a layer's matrices the measure is the error of its outputs over the outputs themselves, of the
head the error of its logits. How much of that comes through as KL divergence was measured on
SmolLM2-135M, for each role, in groups of five layers, the others left in float32: it differs by
role, and is larger at the end, where fewer layers follow that could make up for it.

The error is that of the rounding which follows, by inputs, in some of the rows. Plain rounding of
the same matrices errs 1.4 to 6 times as much, and so said little of which to give 2 bits: with 4.5
bits in the mean, what it chose lost twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.calibrated import quantize_calibrated
from edge.kernels.matmul_nbits.reference import dequantize, quantize
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.weights.allotment import Choice
from edge.weights.block_matrices import Blocks, ZeroBlocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.input_statistics import InputStatistics
from edge.weights.quantized_store import store_errors_as_edge_errors
from edge.weights.weight_limits import check_weights, largest_of

_KL_PER_ERROR = {
    "query.weight": 0.1,
    "key.weight": 0.2,
    "value.weight": 0.4,
    "output.weight": 0.09,
    "gate.weight": 0.15,
    "up.weight": 0.15,
    "down.weight": 0.2,
}
_USUAL_KL_PER_ERROR = 0.2
_LATE_ROLES, _LATE_FACTOR = ("gate.weight", "up.weight", "down.weight"), 2.5
"""Of feed-forward blocks in the last sixth of the layers."""
_SAMPLES, _SAMPLE_ROWS = 8, 16
"""Runs of rows that stand for all."""
_SIZES, _CUT_SIZES, _SMALLEST = (128, 64, 32), (64, 32), 32
"""Columns of a block. Where columns are shared out among devices, not too large."""
_CUT_ROLES = ("down.weight",)
_FINE_BITS = 8

Array = NDArray[np.float32]


def choices_of(
    checkpoint: Checkpoint,
    statistics: InputStatistics,
    *,
    tokens: int,
    on_matrix: Callable[[int, int], None],
) -> dict[str, list[Choice]]:
    """By role of every matrix that a token is multiplied with: the kinds it could be of.

    tokens: how many the statistics are of. `on_matrix` is told how many are done, and of how many;
    it may raise.
    """
    shapes = _multiplied_with(checkpoint.spec)
    found: dict[str, list[Choice]] = {}
    for number, (role, (rows, columns)) in enumerate(shapes.items()):
        on_matrix(number, len(shapes))
        weight, grams = _sampled(checkpoint, role, rows), statistics.grams(role)
        loss_of = _head_loss if role == "head" else _layer_loss
        scale = 1 / tokens if role == "head" else _scale(checkpoint.spec, role)
        found[role] = [
            Choice(
                kind=kind,
                num_bytes=_size(kind, rows, columns),
                loss=scale * loss_of(weight, _rounded(weight, kind, grams), grams),
            )
            for kind in _kinds(role, columns)
        ]
    return found


def least_bytes(spec: ModelSpec) -> int:
    """Of the choices together that any model of this form has."""
    return sum(
        min(_size(kind, rows, columns) for kind in _kinds(role, columns))
        for role, (rows, columns) in _multiplied_with(spec).items()
    )


def _multiplied_with(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The shapes of the matrices that a token is multiplied with, by role."""
    return {
        role: (shape[0], shape[1])
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role not in TABLES
    }


def _size(kind: Blocks, rows: int, columns: int) -> int:
    return sum(array.nbytes for array in kind.arrays(rows, columns))


def _kinds(role: str, columns: int) -> Iterator[Blocks]:
    """Blocks that leave no part of one empty, as far as there are such."""
    sizes = _CUT_SIZES if role.endswith(_CUT_ROLES) else _SIZES
    fitting = [size for size in sizes if columns % size == 0] or [_SMALLEST]
    for bits in (2, 4):
        for size in fitting:
            yield ZeroBlocks(bits, size)
    yield Blocks(_FINE_BITS, fitting[0])


def _scale(spec: ModelSpec, role: str) -> float:
    _layers, layer, local = role.split(".", 2)
    scale = _KL_PER_ERROR.get(local, _USUAL_KL_PER_ERROR)
    is_late = local in _LATE_ROLES and int(layer) >= spec.num_layers - spec.num_layers // 6
    return scale * _LATE_FACTOR if is_late else scale


def _layer_loss(weight: Array, rounded: Array, grams: Sequence[Array]) -> float:
    energy = _energy(weight, grams)
    return _energy(weight - rounded, grams) / energy if energy > 0 else 0.0


def _head_loss(weight: Array, rounded: Array, grams: Sequence[Array]) -> float:
    """Half the variance of the logits' errors, over the vocabulary."""
    return 0.5 * _energy(weight - rounded, grams) / len(weight)


def _energy(weight: Array, grams: Sequence[Array]) -> float:
    """The squares of the outputs, summed over outputs and tokens."""
    total, start = 0.0, 0
    for gram in grams:
        part = weight[:, start : start + len(gram)]
        total += float(np.vdot(part @ gram, part))
        start += len(gram)
    return total


def _rounded(weight: Array, kind: Blocks, grams: Sequence[Array]) -> Array:
    """As it will be; in 8 bits, whose error hardly counts, without the inputs, which takes less
    time."""
    zero_points = isinstance(kind, ZeroBlocks)
    if kind.bits == _FINE_BITS:
        return dequantize(
            quantize(weight, bits=kind.bits, block_size=kind.block_size, zero_points=zero_points)
        )
    return dequantize(
        quantize_calibrated(
            weight, grams, bits=kind.bits, block_size=kind.block_size, zero_points=zero_points
        )
    )


def _sampled(checkpoint: Checkpoint, role: str, rows: int) -> Array:
    name = checkpoint.tensor_name(role)
    count, samples = _SAMPLE_ROWS, _SAMPLES
    if rows <= count * samples:
        count, samples = rows, 1
    starts = [(rows - count) * sample // max(1, samples - 1) for sample in range(samples)]
    with store_errors_as_edge_errors():
        parts = [checkpoint.store.read(name, rows=range(start, start + count)) for start in starts]
    weight = np.concatenate(parts).astype(np.float32)
    check_weights(checkpoint.store, name, largest_of(weight))
    return weight
