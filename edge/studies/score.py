"""How likely a model finds a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.studies.logit_statistics import compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a text. logprobs [tokens - 1]: of every token after the first, in
    nats, given those before it."""

    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Score of {len(self.token_ids)} tokens: perplexity {self.perplexity:.4g}>"

    @property
    def total(self) -> float:
        """The logarithm of the likelihood of all that follows the first token."""
        return float(self.logprobs.sum())

    @property
    def perplexity(self) -> float:
        """What a token would be chosen among, were all of them as likely as these are."""
        return float(np.exp(-self.logprobs.mean()))


def score_of(token_ids: tuple[int, ...], logits: NDArray[np.float32]) -> Score:
    """By the logits [tokens, vocab] that follow each token."""
    losses = compare(None, logits[:-1], token_ids[1:]).losses
    return Score(token_ids=token_ids, logprobs=-losses)
