"""Loss and KL divergence of one model's logits against another's, in float64. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats64 = NDArray[np.float64]

_NUMBERS_AT_ONCE = 1 << 21
"""Most numbers of one array in float64: 16 MiB for any vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The statistics of each of n positions."""

    losses: Floats64
    """[n] the negative log probability of the token that followed, in nats."""
    divergences: Floats64
    """[n] KL(reference || this) of the expected next token, in nats."""
    same_top: NDArray[np.bool_]
    """[n] whether the most likely token is the reference's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The statistics over all positions."""

    perplexity: float
    """exp of the mean loss."""
    mean_kl: float
    p99_kl: float
    """The 99th percentile of the divergence."""
    same_top: float
    """The share of positions with the reference's top token, 0 to 1."""


def log_probabilities(logits: NDArray[np.floating]) -> Floats64:
    """The logarithm of the softmax of each row [n, vocab]."""
    found = logits.astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


def compare(
    reference: NDArray[np.floating] | None,
    logits: NDArray[np.floating],
    next_tokens: Sequence[int],
) -> Positions:
    """Compare logits [n, vocab] and the tokens [n] that followed with a reference.

    reference: the other model's logits [n, vocab]; None for the reference itself, with divergence
    0. Adding a constant to a row changes nothing, so log probabilities may stand for logits.
    """
    count, vocab_size = logits.shape
    rows_at_once = max(1, _NUMBERS_AT_ONCE // vocab_size)
    parts = [
        _compare(
            None if reference is None else reference[begin : begin + rows_at_once],
            logits[begin : begin + rows_at_once],
            np.asarray(next_tokens[begin : begin + rows_at_once]),
        )
        for begin in range(0, count, rows_at_once)
    ]
    return joined(parts)


def _compare(
    reference: NDArray[np.floating] | None,
    logits: NDArray[np.floating],
    next_tokens: NDArray[np.integer],
) -> Positions:
    ours = log_probabilities(logits)
    losses = -ours[np.arange(len(ours)), next_tokens]
    if reference is None:
        return Positions(
            losses=losses,
            divergences=np.zeros(len(ours)),
            same_top=np.ones(len(ours), np.bool_),
        )
    theirs = log_probabilities(reference)
    divergences = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    return Positions(
        losses=losses,
        divergences=divergences.clip(min=0),  # rounding may leave -1e-17
        same_top=theirs.argmax(axis=1) == ours.argmax(axis=1),
    )


def joined(parts: Sequence[Positions]) -> Positions:
    """Join the statistics of several pieces, at least one."""
    return Positions(
        losses=np.concatenate([part.losses for part in parts]),
        divergences=np.concatenate([part.divergences for part in parts]),
        same_top=np.concatenate([part.same_top for part in parts]),
    )


def figures(positions: Positions) -> Figures:
    """The figures over all positions; infinite if exp overflows."""
    loss = float(positions.losses.mean())
    return Figures(
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        mean_kl=float(positions.divergences.mean()),
        p99_kl=float(np.percentile(positions.divergences, 99)),
        same_top=float(positions.same_top.mean()),
    )
