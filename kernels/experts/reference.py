"""Σ over the chosen experts e of w_e · expert_e(x).

The router's logits become scores: by a softmax over all experts, or each by its sigmoid. The
`top_k` largest are chosen, and are the weights w: as they are, or divided by their sum (Shazeer et
al., Outrageously Large Neural Networks, 2017; Jiang et al., Mixtral of Experts, 2024).

What is chosen by may be the scores and a correction for each expert, which the weights do not have.
Experts may be in groups: then only those of the groups are chosen from whose two best are most in
sum (DeepSeek-AI, DeepSeek-V3, 2024).

Each expert may have a number that its weights are multiplied by at last (Google, Gemma 4, 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)
BEST_OF_GROUP = 2
"""How many of a group's scores say how good it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen and weighted."""

    top_k: int
    renormalized: bool
    """Weights add up to 1, before they are scaled."""
    scoring: Scoring = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    """What weights are multiplied by."""
    least_sum: float = 0.0
    """What is added to the sum that weights are divided by."""


def route(
    logits: Array,
    routing: Routing,
    correction: Array | None = None,
    scales: Array | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """logits [rows, experts]; correction, scales [experts] → the chosen ones and their weights,
    both [rows, top_k]."""
    if routing.scoring == "softmax":
        scores = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranked.reshape(len(ranked), routing.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -BEST_OF_GROUP:].sum(axis=-1)
        order = np.argsort(-best, axis=-1, kind="stable")[:, : routing.chosen_groups]
        is_chosen = np.zeros(best.shape, np.bool_)
        np.put_along_axis(is_chosen, order, True, axis=-1)
        ranked = np.where(is_chosen[..., None], grouped, -np.inf).reshape(ranked.shape)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : routing.top_k]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.renormalized:
        weights /= weights.sum(axis=-1, keepdims=True) + routing.least_sum
    weights = weights * routing.scale
    return chosen, weights if scales is None else weights * scales[chosen]


def experts(
    x: Array,
    logits: Array,
    correction: Array | None = None,
    scales: Array | None = None,
    *,
    routing: Routing,
    expert: Callable[[int, Array], Array],
) -> Array:
    """x [rows, n], logits [rows, experts] → [rows, n]. expert(number, x [rows, n]) → [rows, n]."""
    mixed = np.zeros(x.shape, np.float64)
    chosen, weights = route(logits, routing, correction, scales)
    for number in np.unique(chosen):
        rows, places = np.nonzero(chosen == number)
        mixed[rows] += weights[rows, places, None] * expert(int(number), x[rows])
    return mixed.astype(np.float32)
