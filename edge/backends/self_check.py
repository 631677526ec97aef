"""Self check of a shard at load: does this device compute what the reference computes?

Drivers, compilers, kernels and processors have bugs, and a wrong shard silently spoils every reply.
So the shard's operators get known inputs, few rows and more, and their outputs are compared with
the numpy formulas. This module has the part that all back ends need. It only reads the shard's
file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, RequestError

ROWS = (1, 5)
"""Products of few rows and of more have kernels of their own."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The device that computed, and the remedy if it is wrong."""

    backend: str
    device_name: str
    remedy: str

    def compare(self, operator: str, found: Array, expected: Array, *, allowed: float) -> None:
        """Raises RequestError if the largest error exceeds that share of the largest value.
        CheckpointError if the reference gives no numbers: then the weights are at fault."""
        if not np.isfinite(expected).all():
            raise CheckpointError(
                f"the weights of {operator} give NaN or infinity whoever computes with them: the "
                "checkpoint is damaged, fetch it again"
            )
        found = found.reshape(expected.shape)
        error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-9))
        if not error <= allowed:  # NaN is no agreement either
            raise RequestError(
                f"back end {self.backend} computes wrongly on this device ({self.device_name}): "
                f"{operator} errs by {error:.2g} of its largest value, and {allowed:.2g} is "
                "allowed",
                remedy=self.remedy,
            )


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of the first `count` numbers, the ends among them."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, most).astype(np.int64))]
