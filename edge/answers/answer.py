"""Requests as their callers made them: they outlive the plan that runs them, and know no peers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.answers.copies import KvCopies
from edge.errors import EdgeError
from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.step import FinishReason, Rows, SamplingTerms
from edge.scheduling.fairness import ANYBODY, Who
from edge.scheduling.prefixes import Spans
from edge.text.grammar import Matcher


class Sink(Protocol):
    """Where a request's results go; called from the event loop's thread."""

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> bool:
        """A sampled token, and why it is the last, if it is. True if its text ends the reply.

        chosen_s: when it was chosen, by `time.monotonic` here, whichever device chose it.
        logprobs: where the request asked for them.
        """
        ...

    def rows(self, rows: NDArray[np.float32]) -> None:
        """All that were wanted [rows, columns], of a request that wants rows."""
        ...

    def failed(self, error: EdgeError) -> None: ...


def new_request_id() -> str:
    """Like no other."""
    return uuid.uuid4().hex


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What was asked, and what has come of it so far.

    One that is not finished may be submitted to another plan when its own has ended: it goes on
    after its last token, and draws the same tokens as it would have, because the noise of a draw
    depends on the seed and the token's position in prompt and answer only.
    """

    prompt: tuple[int, ...]
    terms: SamplingTerms | None
    """None: `rows` of the prompt are wanted, and no token."""
    sink: Sink
    rows: Rows = "logits"
    matcher: Matcher | None = None
    """Where its answer must keep to a grammar. Behind the answer's tokens so far."""
    who: Who = ANYBODY
    """Who asked, and how urgently."""
    cache_salt: str = ""
    """What is kept of its keys and values is found by requests with the same one alone."""
    id: str = field(default_factory=new_request_id)
    """What peers, and logs of all devices, call it."""
    answer: list[int] = field(default_factory=list)
    """Tokens so far."""
    found_tokens: int = 0
    """Tokens of its prompt whose keys and values were there: they were not computed."""
    singly: Spans = ()
    """Tokens of its prompt that were computed one at a time, as they were answers once. Its own
    answer would be another in its last bits where they were not."""
    kept: KvCopies | None = None
    """Copies of the keys and values of the answer so far, where they are wanted."""

    @property
    def terms_left(self) -> SamplingTerms | None:
        """The terms for a plan that starts with it: a part of the answer is its prompt."""
        if self.terms is None:
            return None
        left = self.terms.max_new_tokens - len(self.answer)
        assert left > 0, "it is finished"
        return replace(self.terms, max_new_tokens=left)


OnEnd = Callable[[Sequence[Request], EdgeError], None]
"""Told when a plan ends: the requests that are not finished, and why."""


def fail_all(requests: Sequence[Request], error: EdgeError) -> None:
    """An owner that gives them up."""
    for request in requests:
        request.sink.failed(error)
