"""Routing: which copy of a model answers a request.

Pure. The request goes where its first token and its answer are predicted soonest: a copy that has
the beginning of its prompt computes only the rest, and one with fewer requests has shorter steps.
Of copies that are equally loaded, the one with the longest beginning is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

USUAL_ANSWER_TOKENS = 128
"""Tokens of an answer that are counted at most: most answers end before their limit."""

PROMPT_TOKEN_S, TOKEN_S, FURTHER_S = 0.01, 0.1, 0.05
"""Seconds for a copy whose speed is not known. Only their ratios count where no speed is known. On
one core, 0.5 billion weights in int4 took 1 : 9, and 0.4 of a step for each further request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """One copy as a request finds it."""

    found_tokens: int = 0
    """Tokens of the request's prompt that it need not compute."""
    waiting_tokens: int = 0
    """Tokens of other prompts that it has still to compute."""
    requests: int = 0
    """Requests under way and waiting."""
    places: int = 1
    """Requests that share a step; further ones wait."""
    prompt_token_s: float = PROMPT_TOKEN_S
    """Seconds for a token of a prompt."""
    token_s: float = TOKEN_S
    """Seconds of a step with one request."""
    further_s: float = FURTHER_S
    """Seconds that a further request adds to a step."""

    def seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """Predicted seconds until a request with such a prompt has its answer."""
        left = max(0, prompt_tokens - self.found_tokens)
        prompts_s = (self.waiting_tokens + left) * self.prompt_token_s
        sharing = min(self.requests, self.places - 1)
        step_s = self.token_s + sharing * self.further_s
        turns = max(1.0, (self.requests + 1) / self.places)
        return prompts_s + min(new_tokens, USUAL_ANSWER_TOKENS) * step_s * turns


def route(prompt_tokens: int, new_tokens: int, copies: Sequence[CopyState]) -> int:
    """The number of the copy that answers the request.

    Ties go to the longest beginning, then to the fewest requests, then to the earlier copy.
    """
    return min(
        range(len(copies)),
        key=lambda number: (
            copies[number].seconds(prompt_tokens, new_tokens),
            -copies[number].found_tokens,
            copies[number].requests,
            number,
        ),
    )
