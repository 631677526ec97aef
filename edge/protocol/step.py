"""A step that all shards of a plan compute together: its entries, terms and limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from edge.kernels.sampling.logprobs import MOST_LOGPROBS
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.fields import Text, Whole

Rows = Literal["logits", "states", "last state"]
"""The rows of a prompt without an answer: logits of each position, the hidden states before the
head, or only the last of these."""

FinishReason = Literal["stop", "length"]
"""Why a token is the last of a reply: "stop": it is an end token, or the text ends the reply;
"length": no more tokens were asked for."""

MAX_CHUNK_TOKENS = 4096
MAX_REQUESTS = 1024
SHORTEST_STEP = 2
"""The fewest tokens of a prompt whose rows have the same bits as in any longer step. One token
alone is computed by other kernels."""
MOST_KEPT = 64
"""The most prefix caches of finished requests in a shard: enough for as many clients that take
turns. Memory is the narrower limit, because these caches only use memory that is free otherwise."""
MAX_SAVED_STATES = 64
"""The most saved states that a shard may be asked to have room for."""
MAX_END_IDS = 64
"""The most tokens that end a reply; models have one to five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One request's part of a step: its token ids from `position` on.

    Logits are computed for the last `logit_rows` of them.
    """

    request: Text
    position: Whole
    tokens: Annotated[tuple[Whole, ...], Meta(max_length=MAX_CHUNK_TOKENS)]
    logit_rows: Whole

    @property
    def end(self) -> int:
        """The position after the last token, which is the number of tokens in the KV cache after
        the step."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One computation of all shards of a plan: a chunk of one request, or one token of several
    requests.

    run: above 1, the shards go on by themselves, with each sampled token as the next step's input,
    until `run` tokens are sampled, a request ends, or the sampler is asked to yield.

    singly: the tokens of each request are known, and are computed one after the other, as those of
    an answer are. So keys and values have the same bits as when the answer was first computed. No
    token is sampled.

    states: the rows that `logit_rows` counts are hidden states after the last norm, the input of
    the head, instead of logits.
    """

    entries: Annotated[tuple[StepEntry, ...], Meta(max_length=MAX_REQUESTS)]
    run: int = 1
    singly: bool = False
    states: bool = False

    def __post_init__(self) -> None:
        if not self.entries or any(not entry.tokens for entry in self.entries):
            raise ValueError("a step needs at least one request, and each at least one token")
        if self.batch > MAX_REQUESTS or self.num_tokens > MAX_CHUNK_TOKENS:
            raise ValueError(
                f"a step of more than {MAX_REQUESTS} requests or a chunk of more than "
                f"{MAX_CHUNK_TOKENS} tokens"
            )
        if self.singly:
            self._check_singly()
        elif len(self.entries) > 1 and any(len(entry.tokens) != 1 for entry in self.entries):
            raise ValueError("a step of several requests takes one token of each")
        if len({entry.request for entry in self.entries}) != len(self.entries):
            raise ValueError("a request occurs twice in a step")
        if any(not 0 <= entry.logit_rows <= len(entry.tokens) for entry in self.entries):
            raise ValueError("a step wants more logits than it has tokens")
        if self.states and (self.run != 1 or self.batch != 1 or not self.logit_rows):
            raise ValueError("a step for hidden states needs one request, and cannot be a run")
        if self.run < 1 or (self.run > 1 and any(e.logit_rows != 1 for e in self.entries)):
            raise ValueError("a run needs exactly one row of logits of every request")

    def _check_singly(self) -> None:
        if self.run != 1 or any(entry.logit_rows for entry in self.entries):
            raise ValueError("a step with `singly` cannot sample tokens")
        if any(len(entry.tokens) != self.num_tokens for entry in self.entries):
            raise ValueError("a step needs the same number of tokens of each request")
        if self.batch * self.num_tokens > MAX_CHUNK_TOKENS:
            raise ValueError(f"a step of more than {MAX_CHUNK_TOKENS} tokens")

    @property
    def batch(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of each entry; all entries have the same number."""
        return len(self.entries[0].tokens)

    @property
    def logit_rows(self) -> int:
        """Rows of logits that the head computes for each entry: the most that any entry wants."""
        return max(entry.logit_rows for entry in self.entries)

    @property
    def apart(self) -> tuple[Step, ...]:
        """The single-token steps of a step with `singly`."""
        return tuple(
            Step(
                entries=tuple(
                    StepEntry(
                        request=entry.request,
                        position=entry.position + index,
                        tokens=(entry.tokens[index],),
                        logit_rows=0,
                    )
                    for entry in self.entries
                )
            )
            for index in range(self.num_tokens)
        )

    def following(self, tokens: Sequence[int]) -> Step:
        """The next step of a run, from the token sampled for each entry."""
        return Step(
            entries=tuple(
                StepEntry(request=entry.request, position=entry.end, tokens=(token,), logit_rows=1)
                for entry, token in zip(self.entries, tokens, strict=True)
            ),
            run=self.run - 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTerms:
    """What the shards of the last stage must know about a request before its first token."""

    sampling: SamplingParameters
    end_ids: Annotated[frozenset[int], Meta(max_length=MAX_END_IDS)]
    max_new_tokens: int
    prompt_tokens: int = 0
    """Tokens of the prompt. The tokens after it are the answer, including those that an earlier
    plan computed."""
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    """The number of likeliest tokens whose log probabilities are reported with each token; None: no
    log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of steps and requests, for which buffers are made once."""

    context_tokens: int
    """Longest prompt and answer of one request."""
    chunk_tokens: int
    """Most tokens of one request in a step."""
    requests: int
    """Most requests under way at once."""
    cached_tokens: int
    """Tokens of all requests together that the KV cache has memory for."""
    disk_tokens: int = 0
    """Tokens of all requests together that the KV cache has disk space for; 0: none."""
    observes: bool = False
    """Sum up the inputs of products, for quantization with data."""
    batch_invariant: bool = False
    """A decoding step computes the same bits for a request whichever other requests are in it. For
    back ends that can pad such steps as their kernels need."""
    saved_states: int = 0
    """Saved states that there is room for, in models with recurrent layers. A prompt that begins
    like another goes on from one of these."""

    @property
    def states(self) -> int:
        """States of requests and saved states that there is memory for, in models with recurrent
        layers."""
        return self.requests + self.saved_states

    @property
    def caches(self) -> int:
        """Requests that have a KV cache at once."""
        return self.requests + MOST_KEPT

    @property
    def exceeds_memory(self) -> bool:
        """Whether one request may have more tokens than fit into memory."""
        return bool(self.disk_tokens) and self.context_tokens > self.cached_tokens
