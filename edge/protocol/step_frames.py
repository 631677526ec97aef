"""Frames of steps: what is computed, the tokens and rows that come of it, and a request's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.frame_codec import MOST_COPY_BYTES, SMALL, Event, Payload, Post, Raw
from edge.protocol.step import (
    MAX_REQUESTS,
    MOST_DRAFTED,
    MOST_IN_TURN,
    FinishReason,
    Guesses,
    SamplingTerms,
    Step,
)
from edge.protocol.token_logprobs import MOST_BYTES_OF_A_TOKEN, read_logprobs, write_logprobs
from edge.transport.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRows(Post):
    """Rows of pictures, for the tokens of a request from `position` on: float32
    [tokens, (1 + picture_layers) · hidden]. Shards that look up embeddings or have some of the
    model's first `picture_layers` layers get them before the step that computes them."""

    kind = "picture_rows"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    request: str
    position: int
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Post):
    """Compute a step. The sampler reports tokens, logits or states."""

    kind = "step"
    limits = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_PAYLOAD_BYTES)
    session: str
    step: Step
    terms: Annotated[Mapping[str, SamplingTerms], Meta(max_length=MAX_REQUESTS)] = field(
        default_factory=dict
    )
    """Terms of the requests that want tokens and whose first step this is; others want logits."""
    masked: Annotated[tuple[str, ...], Meta(max_length=MAX_REQUESTS)] = ()
    """Requests with a token mask."""
    masks: Raw = b""
    """The masks of these requests, as many of each as the step gives tokens at most; see
    `edge.protocol.token_masks`. Used in the last stage only."""

    def __post_init__(self) -> None:
        if not self.terms.keys() <= {entry.request for entry in self.step.entries}:
            raise ValueError("terms has a request that is not in the step")
        if self.masked and self.step.run > 1 + self.step.drafted:
            raise ValueError("a run of several steps cannot have token masks")
        wanting = {entry.request for entry in self.step.entries if entry.logit_rows}
        if len(set(self.masked)) < len(self.masked) or not wanting.issuperset(self.masked):
            raise ValueError("masked has a request twice, or one that wants no token in the step")
        if self.step.states and (self.terms or self.masked):
            raise ValueError("a step for hidden states cannot have terms or token masks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """One token for each entry of a step that wants one. A run reports tokens several times.

    A step that verifies a draft reports all its tokens at once: the accepted guesses, and the token
    after them.
    """

    kind = "tokens"
    limits = FrameLimits(
        header_bytes=SMALL.header_bytes, payload_bytes=MAX_REQUESTS * MOST_BYTES_OF_A_TOKEN
    )
    tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_REQUESTS)]
    ends: Annotated[tuple[FinishReason | None, ...], Meta(max_length=MAX_REQUESTS)]
    """Why each token is the last of its request; None: it is not."""
    last: bool
    """The step, or the run, is over."""
    chosen_s: float
    """Time of the choice, by the sampler's monotonic clock."""
    logprobs: Annotated[tuple[Logprobs | None, ...], Payload(write_logprobs, read_logprobs)] = ()
    """Log probabilities of each token if its request wants them; empty if none does."""
    drafted: Annotated[int, Meta(ge=0, le=MOST_DRAFTED)] = 0
    """Tokens of the draft that the step verified."""
    together: bool = False
    """The rows of the step were those of several tokens of the answer."""
    pairs: bool = False
    """The row of the newest token is to be computed in a step of an even number of rows."""
    guesses: Annotated[tuple[Guesses, ...], Meta(max_length=MOST_IN_TURN)] = ()
    """For each entry of the step, unless there are none; only once it is over."""

    def __post_init__(self) -> None:
        if self.drafted and not 1 <= len(self.tokens) <= 1 + self.drafted:
            raise ValueError("a step gives one token more than guesses of its draft are right")
        if self.drafted and not self.together:
            raise ValueError("a draft without several rows")
        if any(self.ends[:-1]) and self.drafted:
            raise ValueError("tokens follow the last one")
        if len(self.ends) != len(self.tokens):
            raise ValueError("ends needs one entry for each token")
        if self.guesses and not (self.last and len(self.guesses) == self._num_entries):
            raise ValueError("guesses come with the last token of each request")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError("logprobs needs one entry for each token")

    @property
    def _num_entries(self) -> int:
        return 1 if self.drafted else len(self.tokens)

    @property
    def pairs_of_each(self) -> list[bool]:
        """`pairs` for each token, also where its request has guesses."""
        found = [self.pairs or bool(each.tokens) for each in self.guesses]
        found = found or [self.pairs] * self._num_entries
        return found * (len(self.tokens) if self.drafted else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Event):
    """Float32 logits of a step's request, row after row."""

    kind = "logits"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class States(Event):
    """Float32 hidden states of a step's request, row after row."""

    kind = "states"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRun(Post):
    """End the run after its current token, because other requests wait."""

    kind = "yield_run"
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Post):
    """The request is over: free its cache."""

    kind = "finish"
    limits = FrameLimits(header_bytes=SMALL.header_bytes)
    session: str
    request: str
    kept_tokens: int = 0
    """First tokens of its cache that stay as a prefix cache, until the request is finished
    again."""
    answer: Raw = b""
    """The kept tokens after the matched prompt; see `fields.token_bytes`."""
