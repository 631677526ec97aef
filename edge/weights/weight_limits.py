"""Limits of weights: larger ones give no numbers. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.offload import WeightStore

LARGEST_WEIGHT = 1e15
"""Products of two of these, and sums of their squares, are still float32; weights of models are
below 1e4."""

_CHUNK_VALUES = 1 << 20
"""Widened to float32 at once."""


def largest_of(values: NDArray[Any]) -> float:
    """The largest absolute value, of any float type; NaN where one is NaN."""
    flat = values.reshape(-1)
    largest = 0.0
    with np.errstate(invalid="ignore"):  # NaN
        for start in range(0, flat.size, _CHUNK_VALUES):
            part = flat[start : start + _CHUNK_VALUES].astype(np.float32, copy=False)
            largest = float(np.maximum(largest, np.maximum(part.max(), -part.min())))
    return largest


def check_weights(store: WeightStore, name: str, largest: float) -> None:
    """Raises CheckpointError unless a tensor's largest absolute value can be that of a weight."""
    if largest <= LARGEST_WEIGHT:
        return
    held = "NaN or infinite weights"
    if math.isfinite(largest):
        held = f"weights as large as {largest:.2g}, with which products overflow"
    raise CheckpointError(
        f"tensor {name} in {store.where(name)} holds {held}: the checkpoint is damaged, "
        "fetch it again"
    )
