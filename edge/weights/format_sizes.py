"""Sizes of a whole model in a format, in bytes and in words. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from edge.models.parts import MatrixSlice
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.weights.formats import WeightFormat
from edge.weights.recipe import Kind, StoredMatrix


def counted_matrices(
    spec: ModelSpec, weight_format: WeightFormat
) -> Iterator[tuple[StoredMatrix, int]]:
    """Every matrix that a token is multiplied with, and the number of layers with an equal one.

    The embedding is not among them, because it is only looked up.
    """
    spec = weight_format.graded(spec)
    first = {f"layers.{spec.layers.index(kind)}.": kind for kind in range(len(spec.kinds))}
    counts = Counter(spec.layers)
    for role, shape in tensor_shapes(spec).items():
        if len(shape) != 2 or role in TABLES:
            continue
        kind: int | None = None
        if role.startswith("layers."):
            layers, number, _local = role.split(".", 2)
            kind = first.get(f"{layers}.{number}.")
            if kind is None:  # equal to an earlier layer
                continue
        rows, columns = shape
        matrix = MatrixSlice(
            name=role,
            parts=((role, range(rows)),),
            columns=range(columns),
            grade=0 if kind is None else spec.kinds[kind].grade,
        )
        for stored in weight_format.recipe.stored(matrix):
            yield stored, 1 if kind is None else counts[kind]


def num_weights(spec: ModelSpec) -> int:
    """Number of weights of all matrices that a token is multiplied with."""
    shapes = tensor_shapes(spec).items()
    return sum(math.prod(shape) for role, shape in shapes if len(shape) == 2 and role not in TABLES)


def bytes_per_weight(spec: ModelSpec, weight_format: WeightFormat) -> float:
    """Mean stored bytes of a weight of all matrices, with scales."""
    stored = sum(
        count * array.nbytes
        for matrix, count in counted_matrices(spec, weight_format)
        for array in matrix.arrays
    )
    return stored / num_weights(spec)


def in_words(spec: ModelSpec, weight_format: WeightFormat) -> str:
    """The share of weights in each kind of matrix, and the mean bits."""
    counts: Counter[Kind] = Counter()
    for matrix, count in counted_matrices(spec, weight_format):
        counts[matrix.kind] += count * len(matrix.rows) * len(matrix.part.columns)
    bits = f"{8 * bytes_per_weight(spec, weight_format):.3g} bits a weight with their scales"
    if weight_format.note:
        bits += f"; {weight_format.note}"
    if len(counts) == 1:
        (kind,) = counts
        return f"{weight_format.name}: {kind.words}, {bits}"
    total = counts.total()
    parts = [f"{count / total:.0%} {kind.words}" for kind, count in counts.most_common()]
    return f"{weight_format.name}: {', '.join(parts)}; {bits}"
