"""The operators that a device computes to prove its arithmetic, with the numbers that are right.

A few small products, norms, gates and attentions, the same for every model. Some drivers,
compilers and instruction sets give wrong numbers without an error, and one wrong device spoils
every answer. The coordinator has the formulas in numpy, and compares what a device computed for
inputs that follow from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.kernels.cases import Array, Case, Draw
from edge.kernels.gated_mlp.reference import gated
from edge.kernels.matmul.reference import matmul
from edge.kernels.rms_norm.reference import add_rms_norm
from edge.models.attention import Attention
from edge.models.rotary import Rotary
from edge.weights.file_blocks import FileBlocks
from edge.weights.formats import WeightFormat
from edge.weights.matrix_kind import MatrixKind

ROWS = (1, 5, 24)
"""Rows of the computed steps: of one token, of few, and of a chunk. Each has kernels of its own."""

CASES_VERSION = 2
"""Raised with every change of the cases: what was proved by others counts no more."""

LARGEST_ERROR = 1e-3
LARGEST_ERROR_OF_INTEGER_INPUTS = 0.03
"""Error allowed where products round their inputs to 8 bits, which errs by up to 0.014 here."""

EPSILON = 1e-5
CONTEXT = ROWS[-1] + 1
ATTENTION = Attention(
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    rotary=Rotary(inverse_frequencies=tuple(float(10_000.0 ** (-n / 16)) for n in range(16))),
    window=None,
    qkv_bias=False,
    output_bias=False,
    query_key_norm=False,
)

_OUTPUTS, _HIDDEN, _COLUMNS = 24, 512, 32
"""Rows of products, their columns, and the columns of a gate."""

_NORMED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCase:
    """One operator in steps of `ROWS` rows."""

    operator: str
    """Its name in errors, with the format of a product."""
    face: Literal["product", "rms_norm", "gated_mlp", "attention"]
    cases: tuple[Case, ...]
    allowed: float
    """The largest error, as a share of the largest number."""
    kind: MatrixKind[Any] | None = None
    """The kind of a product's matrix."""
    stored: Mapping[str, NDArray[Any]] | None = None
    """The arrays of a product's matrix [_OUTPUTS, _HIDDEN], by suffix."""

    def expected(self) -> list[Array]:
        """The right numbers of each step: the first result of the formula."""
        return [case.expected()[0] for case in self.cases]


def proof_cases(weight_format: WeightFormat, seed: int) -> list[ProofCase]:
    """The operators that a model in this format needs of a device, with inputs by `seed`."""
    draw = Draw(seed)

    def steps(formula: Callable[..., Any], *widths: int, **options: Any) -> tuple[Case, ...]:
        return tuple(
            Case.of(formula, *(draw.normal(1, rows, width) for width in widths), **options)
            for rows in ROWS
        )

    found = []
    for kind in weight_format.recipe.kinds:
        stored = _stored(kind, draw, seed)
        weight = kind.floats(stored.__getitem__, _HIDDEN)[:_OUTPUTS]
        fast = weight_format.rounds(kind)
        found.append(
            ProofCase(
                operator=f"{kind.operator.partition(' ')[0]} in {kind.words}",
                face="product",
                cases=steps(partial(_product, weight), _HIDDEN),
                allowed=LARGEST_ERROR_OF_INTEGER_INPUTS if fast else LARGEST_ERROR,
                kind=kind,
                stored=stored,
            )
        )
    norm = (draw.normal(_NORMED),)
    form = ATTENTION.packed(EPSILON)
    found += [
        ProofCase(
            operator="rms_norm",
            face="rms_norm",
            cases=steps(add_rms_norm, _NORMED, _NORMED, weights=norm, epsilon=EPSILON),
            allowed=LARGEST_ERROR,
        ),
        ProofCase(
            operator="gated_mlp",
            face="gated_mlp",
            cases=steps(gated, 2 * _COLUMNS, activation="silu", clamp=None),
            allowed=LARGEST_ERROR,
        ),
        ProofCase(
            operator="rope and attention",
            face="attention",
            cases=steps(_attended, form.columns, unbatched=True),
            allowed=LARGEST_ERROR,
        ),
    ]
    return found


def distance(found: Array, expected: Array) -> float:
    """The largest error as a share of the largest right number; infinite for NaN or infinity."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-9))


def _product(weight: Array, x: Array) -> Array:
    return matmul(x, weight)


def _attended(x: Array) -> Array:
    form = ATTENTION.packed(EPSILON)
    cos, sin = (table[: len(x)] for table in ATTENTION.rotary.tables(CONTEXT))
    result: Array = form.attend(form.heads(x, cos, sin, None), None)
    return result


def _stored(kind: MatrixKind[Any], draw: Draw, seed: int) -> dict[str, NDArray[Any]]:
    if isinstance(kind, FileBlocks):
        return kind.random(_OUTPUTS, _HIDDEN, np.random.default_rng(seed))
    normal = draw.normal(_OUTPUTS * _HIDDEN)
    codes = np.frombuffer(np.random.default_rng(seed).bytes(1 << 16), np.uint8)
    made = kind.made_up(_HIDDEN, normal=normal, codes=codes)
    made["order"] = np.random.default_rng(seed).permutation(_HIDDEN).astype(np.int32)
    return {
        each.suffix: np.resize(made[each.suffix], each.shape)
        for each in kind.arrays(_OUTPUTS, _HIDDEN)
    }
