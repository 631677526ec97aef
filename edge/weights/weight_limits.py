"""Limits of weights, beyond which products overflow. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.offload import WeightStore

LARGEST_WEIGHT = 1e15
"""Largest weight whose products and sums of squares fit into float32. Weights of models are below
1e4."""

_CHUNK_VALUES = 1 << 20
"""Values that are converted to float32 at once."""


def largest_of(values: NDArray[Any]) -> float:
    """The largest absolute value, of any float type; NaN if any value is NaN."""
    flat = values.reshape(-1)
    largest = 0.0
    with np.errstate(invalid="ignore"):  # NaN
        for start in range(0, flat.size, _CHUNK_VALUES):
            part = flat[start : start + _CHUNK_VALUES].astype(np.float32, copy=False)
            largest = float(np.maximum(largest, np.maximum(part.max(), -part.min())))
    return largest


def check_weights(store: WeightStore, name: str, largest: float) -> None:
    """Raises CheckpointError if a tensor's largest absolute value is too large for a weight."""
    if largest <= LARGEST_WEIGHT:
        return
    held = "NaN or infinite weights"
    if math.isfinite(largest):
        held = f"weights as large as {largest:.2g}, with which products overflow"
    raise CheckpointError(
        f"tensor {name} in {store.where(name)} holds {held}: the checkpoint is damaged, "
        "fetch it again"
    )
