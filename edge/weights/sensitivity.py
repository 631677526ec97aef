"""The loss in quality of each kind of matrix, matrix by matrix, by input statistics.

For matrices of layers the measure is the relative error of their outputs, and for the head the
error of the logits. The resulting KL divergence was measured on SmolLM2-135M for each role, in
groups of five layers, with the others in float32. It differs by role, and is larger at the end,
where fewer layers follow that could compensate it.

Losses of 2 bits are too large to be a sum over matrices: on SmolLM2-135M with 4.6 bits in the mean,
a choice with them lost 0.263 nats, and one without 0.173. So they are used only if there is no room
for 4 bits. Then the error is that of the later rounding by inputs: plain rounding of the same
matrices errs 1.4 to 6 times as much, and with 4.5 bits its choice lost twice as much (0.461 and
0.233). If all have 4 or 8 bits, the choice by plain rounding is better (with 5.46 bits 0.065 and
0.072), because rounding by inputs gains less on other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks import reference as blocks
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, dequantize, quantize
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.weights.bit_allocation import KindChoice
from edge.weights.block_matrices import Blocks
from edge.weights.block_rounding import BlockRounding
from edge.weights.calibrated import rounded
from edge.weights.checkpoint import Checkpoint
from edge.weights.file_blocks import FileBlocks
from edge.weights.input_statistics import InputStatistics
from edge.weights.integer_formats import has_wide_blocks
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
"""Roles of feed-forward blocks, and their factor in the last sixth of the layers."""
_SAMPLES, _SAMPLE_ROWS = 8, 32
"""Number and size of the runs of rows that are sampled."""
_SIZES, _CUT_SIZES, _SMALLEST = (128, 64, 32), (64, 32), 32
"""Columns of a block; smaller ones if columns are divided among devices."""
_CUT_ROLES = ("down.weight",)
_USUAL_BITS, _FINE_BITS = 4, 8
_WIDE_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_NARROW_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

Array = NDArray[np.float32]


def choices_of(
    checkpoint: Checkpoint,
    statistics: InputStatistics,
    *,
    tokens: int,
    total_bytes: float,
    packed: bool,
    on_matrix: Callable[[int, int], None],
) -> dict[str, list[KindChoice]]:
    """The possible kinds of every matrix that a token is multiplied with, by role.

    tokens: number of tokens of the statistics. total_bytes: limit for all matrices; kinds of fewer
    than 4 bits are possible only if not all matrices can have 4. packed: no blocks of GGUF files.
    on_matrix: called with the number of finished matrices and of all; may raise.
    """
    spec = checkpoint.spec
    has_room = least_bytes(spec, packed, _USUAL_BITS) <= total_bytes
    least_bits = _USUAL_BITS if has_room else 0
    shapes = _multiplied_with(spec)
    found: dict[str, list[KindChoice]] = {}
    for number, (role, (rows, columns)) in enumerate(shapes.items()):
        on_matrix(number, len(shapes))
        weight, grams = _sampled(checkpoint, role, rows), statistics.grams(role)
        loss_of = _head_loss if role == "head" else _layer_loss
        known = None if least_bits else grams
        scale = 1 / tokens if role == "head" else _scale(spec, role)
        found[role] = [
            KindChoice(
                kind=kind,
                num_bytes=_size(kind, rows, columns),
                loss=scale * loss_of(weight, _rounded(weight, kind, known), grams),
            )
            for kind in _kinds(role, columns, packed, least_bits)
        ]
    return found


def least_bytes(spec: ModelSpec, packed: bool, least_bits: int = 0) -> int:
    """Least bytes of all matrices with `least_bits` bits or more, for any model of this form."""
    return sum(
        min(_size(kind, rows, columns) for kind in _kinds(role, columns, packed, least_bits))
        for role, (rows, columns) in _multiplied_with(spec).items()
    )


def _multiplied_with(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The shapes of the matrices that a token is multiplied with, by role."""
    return {
        role: (shape[0], shape[1])
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role not in TABLES
    }


def _size(kind: Blocks | FileBlocks, rows: int, columns: int) -> int:
    return sum(array.nbytes for array in kind.arrays(rows, columns))


def _kinds(role: str, columns: int, packed: bool, least_bits: int) -> list[Blocks | FileBlocks]:
    """Kinds of blocks that divide the columns, if possible, from coarse to fine."""
    if not packed:
        types = _WIDE_TYPES if has_wide_blocks(role, columns) else _NARROW_TYPES
        return [each for each in map(FileBlocks, types) if each.bits >= least_bits]
    sizes = _CUT_SIZES if role.endswith(_CUT_ROLES) else _SIZES
    fitting = [size for size in sizes if columns % size == 0] or [_SMALLEST]
    coarse: list[Blocks | FileBlocks] = [
        Blocks(bits, size, zero_points=True) for bits in (2, _USUAL_BITS) for size in fitting
    ]
    return [each for each in coarse if each.bits >= least_bits] + [Blocks(_FINE_BITS, fitting[0])]


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
    """Sum of squared outputs over outputs and tokens."""
    total, start = 0.0, 0
    for gram in grams:
        part = weight[:, start : start + len(gram)]
        total += float(np.vdot(part @ gram, part))
        start += len(gram)
    return total


def _rounded(weight: Array, kind: Blocks | FileBlocks, grams: Sequence[Array] | None) -> Array:
    """The weight rounded by its inputs, if given. 8 bits are always rounded plainly, which is
    faster, because their error is small."""
    if grams is not None and kind.bits != _FINE_BITS:
        codes = rounded(weight, kind, grams)
    elif isinstance(kind, FileBlocks):
        codes = BlockRounding(kind.form).rounded(weight)[0]["blocks"]
    else:
        codes = quantize(
            weight, bits=kind.bits, block_size=kind.block_size, zero_points=kind.zero_points
        )
    if isinstance(codes, QuantizedMatrix):
        return dequantize(codes)
    assert isinstance(kind, FileBlocks)
    return blocks.dequantize(kind.form, codes)[:, : weight.shape[1]]


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
