"""Self check of a shard at load, by comparing this device's results with the reference.

Drivers, compilers, kernels and processors have bugs, and a wrong shard silently spoils every reply.
So the shard's operators get known inputs, in steps of few and of more rows, and their outputs are
compared with the numpy formulas. This module has the part that all back ends need. It only reads
the shard's file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, RequestError

ROWS = (1, 5)
"""Rows of the checked steps. Products of few rows and of more use different kernels."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Compares results of a device, and names the remedy if they are wrong."""

    backend: str
    device_name: str
    remedy: str

    def compare(
        self,
        operator: str,
        found: Array,
        expected: Array,
        *,
        allowed: float,
        typical: float = 0.0,
    ) -> None:
        """Raises RequestError if the largest error exceeds this share of the largest value, and
        CheckpointError if the reference gives NaN or infinity, because of damaged weights.

        typical: the usual size of a value. The one output of a matrix of one row may be near 0 by
        chance, and its rounding error is not.
        """
        if not np.isfinite(expected).all():
            raise CheckpointError(
                f"the weights of {operator} give NaN or infinity on any device: the checkpoint is "
                "damaged, fetch it again"
            )
        found = found.reshape(expected.shape)
        largest = max(float(np.abs(expected).max()), typical, 1e-9)
        error = float(np.abs(found - expected).max()) / largest
        if not error <= allowed:  # also true for NaN
            raise RequestError(
                f"back end {self.backend} computes wrongly on this device ({self.device_name}): "
                f"{operator} errs by {error:.2g} of its largest value, and {allowed:.2g} is "
                "allowed",
                remedy=self.remedy,
            )


def typical_output(weight: Array) -> float:
    """The usual size of a product of standard normal inputs with these rows [rows, columns]."""
    return float(np.linalg.norm(weight, axis=1).max(initial=0.0))


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of the first `count` numbers, with both ends."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, most).astype(np.int64))]
