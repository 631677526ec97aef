"""How much a model was given to compute: what prompts begin with alike, and who goes away, show in
it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What peers were given to compute since the model was loaded."""

    prompt_tokens: int = 0
    """Tokens of prompts in steps that were sent; those whose keys and values were found do not
    count."""
    answer_tokens: int = 0
    """Tokens of answers in steps that have ended, also where nobody wanted them any more."""
    steps: int = 0
    """That were sent, and those that runs went on with."""

    def __add__(self, other: Work) -> Work:
        return Work(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            answer_tokens=self.answer_tokens + other.answer_tokens,
            steps=self.steps + other.steps,
        )
