"""Σ over the chosen experts e of w_e · expert_e(x).

The router's logits become probabilities by a softmax over all experts. The `top_k` largest are
chosen, and are the weights w: as they are, or divided by their sum (Shazeer et al., Outrageously
Large Neural Networks, 2017; Jiang et al., Mixtral of Experts, 2024).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def route(
    logits: Array, *, top_k: int, renormalized: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """logits [rows, experts] → the chosen ones and their weights, both [rows, top_k]."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)
    if renormalized:
        weights /= weights.sum(axis=-1, keepdims=True)
    return chosen, weights


def experts(
    x: Array,
    logits: Array,
    *,
    top_k: int,
    renormalized: bool,
    expert: Callable[[int, Array], Array],
) -> Array:
    """x [rows, n], logits [rows, experts] → [rows, n]. expert(number, x [rows, n]) → [rows, n]."""
    mixed = np.zeros(x.shape, np.float64)
    chosen, weights = route(logits, top_k=top_k, renormalized=renormalized)
    for number in np.unique(chosen):
        rows, places = np.nonzero(chosen == number)
        mixed[rows] += weights[rows, places, None] * expert(int(number), x[rows])
    return mixed.astype(np.float32)
