"""A step that all shards of a plan compute together: its terms, and its limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from edge.kernels.sampling.logprobs import MOST_LOGPROBS
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.fields import Text, Whole

Rows = Literal["logits", "states", "last state"]
"""What is wanted of a prompt that gets no answer: the logits of each of its rows, the hidden states
that the head is given for them, or only the last of those."""

FinishReason = Literal["stop", "length"]
"""Why a reply ends with a token: it is an end token (or text ends the reply), or the last one that
was asked for."""

MAX_CHUNK_TOKENS = 4096
MAX_REQUESTS = 1024
SHORTEST_STEP = 2
"""Tokens of a prompt whose rows may be as in any longer step; one alone takes other ways."""
MOST_KEPT = 64
"""Caches of requests that are over, which a shard keeps for those that begin alike: as many as
clients that take turns. Memory is the narrower bound: they lie in what nobody else needs."""
MAX_SAVED_STATES = 64
"""Copies of states that a shard may be asked to have room for."""
MAX_END_IDS = 64
"""Tokens that end a reply; models have one to five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One request's part of a step: the token ids at `position` and after.

    The last `logit_rows` of them want logits.
    """

    request: Text
    position: Whole
    tokens: Annotated[tuple[Whole, ...], Meta(max_length=MAX_CHUNK_TOKENS)]
    logit_rows: Whole

    @property
    def end(self) -> int:
        """The position after the last token: how many tokens the KV cache then holds."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all shards of a plan compute together: a chunk of one request, or one token of several.

    With `run` above 1 the shards go on by themselves, each sampled token the next step's input,
    until `run` tokens are sampled, a request ends, or the sampler is asked to yield.

    With `singly` the tokens of each request are computed one after the other, as an answer is, but
    they are known: so keys and values become what they were, to the last bit, where the answer was
    first computed. None is sampled.

    With `states` the rows that `logit_rows` counts are not logits, but the hidden states after the
    last norm, which the head is given.
    """

    entries: Annotated[tuple[StepEntry, ...], Meta(max_length=MAX_REQUESTS)]
    run: int = 1
    singly: bool = False
    states: bool = False

    def __post_init__(self) -> None:
        if not self.entries or any(not entry.tokens for entry in self.entries):
            raise ValueError("a step needs requests, and each of them tokens")
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
            raise ValueError("a request is twice in a step")
        if any(not 0 <= entry.logit_rows <= len(entry.tokens) for entry in self.entries):
            raise ValueError("a step wants more logits than it has tokens")
        if self.states and (self.run != 1 or self.batch != 1 or not self.logit_rows):
            raise ValueError("hidden states are those of one request, and no token follows")
        if self.run < 1 or (self.run > 1 and any(e.logit_rows != 1 for e in self.entries)):
            raise ValueError("a run goes on from one token of every request")

    def _check_singly(self) -> None:
        if self.run != 1 or any(entry.logit_rows for entry in self.entries):
            raise ValueError("tokens that are computed singly are known: none is sampled")
        if any(len(entry.tokens) != self.num_tokens for entry in self.entries):
            raise ValueError("a step takes as many tokens of each request")
        if self.batch * self.num_tokens > MAX_CHUNK_TOKENS:
            raise ValueError(f"a step of more than {MAX_CHUNK_TOKENS} tokens")

    @property
    def batch(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of each entry; the same for all."""
        return len(self.entries[0].tokens)

    @property
    def logit_rows(self) -> int:
        """Rows of logits of each entry, as the head computes them: the most that one wants."""
        return max(entry.logit_rows for entry in self.entries)

    @property
    def apart(self) -> tuple[Step, ...]:
        """The steps that one with `singly` stands for: a token of each request in each of them."""
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
    """What the shards of the last stage need to know of a request before its first token."""

    sampling: SamplingParameters
    end_ids: Annotated[frozenset[int], Meta(max_length=MAX_END_IDS)]
    max_new_tokens: int
    prompt_tokens: int = 0
    """How many of its tokens are the prompt that its caller gave: what follows is the answer, also
    what another plan has computed of it."""
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    """How many of the likeliest tokens are told with each token, and how likely all of these are;
    None: nothing of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large steps and their requests may get; buffers are made for it once."""

    context_tokens: int
    """Longest prompt and answer of one request."""
    chunk_tokens: int
    """Most tokens of one request in a step."""
    requests: int
    """Most requests under way at once."""
    cached_tokens: int
    """Tokens of all requests together; memory is kept for their KV caches."""
    disk_tokens: int = 0
    """Tokens of all requests together that may be on disk instead; 0: there is no such disk."""
    observes: bool = False
    """Products sum up what they are given, for who rounds the weights by it."""
    batch_invariant: bool = False
    """What a step of one token of each request computes of it should be the same, to the last bit,
    whichever others are in it. Back ends that can fill such steps up where their kernels want it.
    """
    saved_states: int = 0
    """Places for copies of states, where layers have some in place of keys and values: a prompt
    that begins like another goes on from one."""

    @property
    def states(self) -> int:
        """States that there is memory for, where layers have some."""
        return self.requests + self.saved_states

    @property
    def caches(self) -> int:
        """Requests that have a KV cache at once."""
        return self.requests + MOST_KEPT

    @property
    def exceeds_memory(self) -> bool:
        """One request may have more tokens than memory is kept for."""
        return bool(self.disk_tokens) and self.context_tokens > self.cached_tokens
