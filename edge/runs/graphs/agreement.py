"""Whether two results of one graph agree: what may differ, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.graphs.onnx_file import OnnxFile
from edge.graphs.parts import TensorKind
from edge.runs.graphs.remote_part import Arrays, same

TOLERANCE = 1e-3
"""Largest difference of floats, as a share of the largest value of their tensor. ONNX Runtime joins
other nodes where a graph is cut, and sums in another order."""
HALF_TOLERANCE = 1e-2
"""The same where a graph computes in float16, some of it in float32 depending on what is joined."""
QUANTISED_TOLERANCE = 5e-2
"""The same where a graph rounds tensors to 8 bits: a last bit may decide a step of rounding, of
0.4 % or more, and layers behind it make more of it. 1.8 % were seen in a network of 19 atoms."""
_QUANTISING = frozenset(("DynamicQuantizeLinear", "QuantizeLinear"))
_ROUNDING = 2 * float(np.finfo(np.float32).eps)
"""Smaller differences are none. ONNX Runtime computes Sigmoid and Softmax no more exactly, and what
a detector finds in an empty picture may be far below 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a cut graph's results compare with those of the uncut one, for the sample."""

    exact: bool
    """They are equal to the last bit."""
    difference: float
    """The largest difference of floats, as a share of the largest value of their tensor."""
    problem: str | None = None
    """What does not agree; None: all does."""


def tolerance_of(file: OnnxFile, kinds: Mapping[str, TensorKind]) -> float:
    """What floats of a graph may differ by, from its nodes and the kinds of its tensors."""
    if any(node.op_type in _QUANTISING for node in file.nodes):
        return QUANTISED_TOLERANCE
    halves = any(kind.dtype == "float16" for kind in kinds.values())
    return HALF_TOLERANCE if halves else TOLERANCE


def compare(found: Arrays, expected: Arrays, *, tolerance: float) -> Agreement:
    """Compare by name: floats within `tolerance`, 8-bit integers within 1, all else equal."""
    if same(found, expected):
        return Agreement(exact=True, difference=0.0)
    largest, problem = 0.0, None
    for name, array in expected.items():
        other = found.get(name)
        if other is None or other.dtype != array.dtype or other.shape != array.shape:
            return Agreement(
                exact=False, difference=float("inf"), problem=f"{name!r} has another form"
            )
        difference = _difference(other, array)
        largest = max(largest, difference)
        allowed = tolerance if array.dtype.kind == "f" else 0.0
        if difference > allowed and problem is None:
            problem = f"{name!r} differs by {difference:.2g} of its largest value"
    return Agreement(exact=False, difference=largest, problem=problem)


def _difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    if expected.dtype.kind not in "fiu" or not expected.size:
        return 0.0 if bool(np.all(found == expected)) else 1.0
    if expected.dtype.kind != "f":
        wide = np.abs(found.astype(np.int64) - expected.astype(np.int64)).max()
        least = 1 if expected.dtype.itemsize == 1 else 0  # one step of rounding to 8 bits
        return 0.0 if wide <= least else 1.0
    a, b = found.astype(np.float64), expected.astype(np.float64)
    strange = ~np.isfinite(b)
    if (
        not np.array_equal(a[strange], b[strange], equal_nan=True)
        or not np.isfinite(a[~strange]).all()
    ):
        return float("inf")
    apart = np.abs(a - b)[~strange]
    apart = apart[apart > _ROUNDING]
    if not apart.size:
        return 0.0
    scale = np.abs(b[~strange]).max() or 1.0
    return float(apart.max() / scale)
