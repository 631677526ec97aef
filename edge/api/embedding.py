"""Pooling of hidden states to one embedding of a text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edge.errors import PeerError, RequestError, shown
from edge.protocol.step import Rows
from edge.weights.pooling import MakersPooling, Pooling

_ROWS: dict[Pooling, Rows] = {"mean": "states", "last": "last state"}


def rows_for(pooling: Pooling | None, makers: MakersPooling, *, name: str) -> Rows:
    """The rows that a pooling needs; None: as the model's makers say, else the mean.

    Raises RequestError for an unknown pooling. name: the model's, for the error.
    """
    if pooling is None:
        if makers.why_not:
            raise RequestError(
                f"Edge cannot pool the embeddings of {name} as its makers do: {makers.why_not}",
                remedy='choose pooling="mean" or "last", or --pooling',
            )
        pooling = makers.kind or "mean"
    if pooling not in get_args(Pooling):
        known = " or ".join(map(repr, get_args(Pooling)))
        raise RequestError(f"pooling must be {known}, not {shown(pooling)}")
    return _ROWS[pooling]


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises RequestError for dimensions outside 1..hidden_size."""
    if dimensions is None:
        return
    if type(dimensions) is not int or not 1 <= dimensions <= hidden_size:
        raise RequestError(
            f"dimensions must be 1 to {hidden_size} for this model, not {shown(dimensions)}"
        )


def pooled(
    states: NDArray[np.float32], *, normalize: bool, dimensions: int | None = None
) -> NDArray[np.float32]:
    """The mean of states [rows, hidden], as float32 [hidden], or its first `dimensions` values.

    normalize: to length 1, after the cut (Matryoshka embeddings, arXiv:2205.13147). Raises
    PeerError for states that are not finite.
    """
    vector = states.astype(np.float64).mean(axis=0)[:dimensions]
    if not np.isfinite(vector).all():
        raise PeerError("sampler", "sent hidden states that are NaN or infinite")
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    found: NDArray[np.float32] = vector.astype(np.float32)
    return found


def stacked(vectors: Sequence[NDArray[np.float32]], size: int) -> NDArray[np.float32]:
    """The vectors of this size as [vectors, size]; there may be none."""
    return np.stack(vectors) if vectors else np.empty((0, size), np.float32)
