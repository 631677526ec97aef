"""The log probabilities of a text's tokens by a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.studies.logit_statistics import compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a text. logprobs [tokens - 1]: the log probability of every token after the
    first, in nats, given those before it."""

    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Score of {len(self.token_ids)} tokens: perplexity {self.perplexity:.4g}>"

    @property
    def total(self) -> float:
        """The log probability of the whole text after the first token."""
        return float(self.logprobs.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log probability."""
        return float(np.exp(-self.logprobs.mean()))


def check_scored(token_ids: Sequence[int]) -> None:
    """Raises RequestError for fewer than two tokens."""
    if len(token_ids) < 2:
        raise RequestError(
            "a score needs at least two tokens, and the text has one", remedy="give a longer text"
        )


def score_of(token_ids: tuple[int, ...], logits: NDArray[np.float32]) -> Score:
    """The score from the logits [tokens, vocab] after each token."""
    losses = compare(None, logits[:-1], token_ids[1:]).losses
    return Score(token_ids=token_ids, logprobs=-losses)
