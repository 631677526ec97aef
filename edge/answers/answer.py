"""One answer under way: its terms, its tokens so far, and where its results go. Knows no peer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.answers.copies import AnswerCopies
from edge.answers.terms import Terms
from edge.errors import EdgeError
from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.step import FinishReason
from edge.scheduling.prefixes import Spans
from edge.scheduling.prompt_pictures import PromptPictures
from edge.text.grammar import Matcher


class Sink(Protocol):
    """Where the results of an answer go. Called from the thread of the event loop."""

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> bool:
        """The next token, and why it is the last one, if it is. Returns True if its text ends the
        answer.

        chosen_s: when it was chosen, by `time.monotonic` of this process. logprobs: where the terms
        asked for them.
        """
        ...

    def rows(self, rows: NDArray[np.float32]) -> None:
        """All rows that the terms asked for [rows, columns]."""
        ...

    def failed(self, error: EdgeError) -> None: ...


def new_answer_id() -> str:
    """A random id."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class Passes:
    """How many tokens the passes over the weights have given an answer."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    """Tokens of drafts."""
    accepted: int = 0
    """Those that were right."""

    def count(self, drafted: int, tokens: int) -> None:
        """A step has verified a draft of so many tokens, or none, and given so many."""
        self.passes += 1
        self.tokens += tokens if drafted else 1
        self.drafted += drafted
        self.accepted += tokens - 1 if drafted else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerPictures:
    """The pictures of a prompt, as a tower has read them."""

    rows: Mapping[int, NDArray[np.float32]]
    """Rows [hidden] by their ids."""
    places: PromptPictures | None
    """Where they are, if that matters to steps."""
    tiles_read: int
    """Tiles whose rows were not kept from an earlier prompt."""
    seconds: float
    """Until all rows were there, the loading of the tower included."""
    predicted_s: float | None
    """Predicted seconds of reading, on the devices that read; None if their rates are not
    known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """One answer. It outlives the plan that computes it.

    An unfinished answer may be submitted to another plan when its own has ended. It goes on after
    its last token and draws the same tokens, because the noise of a draw depends only on the seed
    and on the token's position in prompt and answer.
    """

    terms: Terms
    sink: Sink
    id: str = field(default_factory=new_answer_id)
    """Its name in the logs of all devices."""
    matcher: Matcher | None = None
    """Its place in its grammar, behind the tokens so far; None: no grammar."""
    tokens: list[int] = field(default_factory=list)
    """Tokens so far."""
    found_tokens: int = 0
    """Tokens of the prompt that were found in a prefix cache and not computed."""
    singly: Spans = ()
    """Spans of the prompt that were computed one token at a time, as they were answers once. A plan
    that computes the prompt again does the same, or the last bits would differ."""
    together: Spans = ()
    """Spans of the answer, counted from the beginning of the prompt, that were computed in steps
    with guesses. A plan that goes on with the answer computes them in the same way."""
    pairs: bool = False
    """The row of its newest token is to be computed in such a step as well."""
    passes: Passes = field(default_factory=Passes)
    pictures: AnswerPictures | None = None
    """The pictures of the prompt; None: it has none."""
    copies: AnswerCopies | None = None
    """Copies of keys and values so far; None: none are wanted."""

    @property
    def ends_together(self) -> bool:
        """Whether its newest token comes of a step with guesses."""
        position = len(self.terms.prompt) + len(self.tokens) - 1
        return bool(self.together) and self.together[-1][1] == position


OnEnd = Callable[[Sequence[Answer], EdgeError], None]
"""Told when a plan ends: its unfinished answers, and why it ended."""


def fail_all(answers: Sequence[Answer], error: EdgeError) -> None:
    """An OnEnd that gives the answers up."""
    for answer in answers:
        answer.sink.failed(error)
