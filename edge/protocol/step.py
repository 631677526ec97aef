"""A step that all shards of a plan compute together: its entries, terms and limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
MOST_DRAFTED = 15
"""The longest draft. With the token before it, it makes an even number of rows, as every draft
does."""
MOST_IN_TURN = 16
"""The most requests that compute in turn, each with a draft: more share their steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """Tokens that probably follow an answer's newest one, whose row is in a step of an even number
    of rows."""

    tokens: Annotated[tuple[Whole, ...], Meta(max_length=MOST_DRAFTED)] = ()
    in_turn: Annotated[int, Meta(ge=0, le=MOST_IN_TURN)] = 0
    """The most requests that are faster in turn, each with such a draft, than in one step."""


NO_GUESSES = Guesses()


Speculation = Literal["auto", "off", "lookup", "draft", "mtp"]
"""How drafts of an answer are made. "lookup": by looking up the last tokens earlier in prompt and
answer; "auto": the same, once the answer repeats them; "draft": by a small model; "mtp": by the
model's further head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One request's part of a step: its token ids from `position` on.

    Logits are computed for the last `logit_rows` of them.
    """

    request: Text
    position: Whole
    tokens: Annotated[tuple[Whole, ...], Meta(max_length=MAX_CHUNK_TOKENS)]
    logit_rows: Whole
    turns: Annotated[tuple[Whole, ...], Meta(max_length=3 * MAX_CHUNK_TOKENS)] = ()
    """Rotary positions of rows of pictures, and of tokens among them: of each token by the first
    axis, then by the second and the third. Empty: of each token `position` less `shift`."""
    shift: Whole = 0
    """By how much rotary positions are less than positions, in tokens behind those of `turns`:
    those of a picture grow by its longer side, not by its rows."""
    sees_all: bool = False
    """The tokens see each other, as the rows of a picture do in some models."""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if self.turns and len(self.turns) != 3 * count:
            raise ValueError(f"{len(self.turns)} rotary positions of {count} tokens")
        if any(each > self.position + at % count for at, each in enumerate(self.turns)):
            raise ValueError("a rotary position beyond that of its token")
        if self.shift > self.position + (count if self.turns else 0):
            raise ValueError(f"rotary positions {self.shift} before {self.position}")

    def part(self, first: int, last: int, *, logit_rows: int) -> StepEntry:
        """Its tokens [first, last) alone."""
        count = len(self.tokens)
        axes = range(0, len(self.turns), count) if count else ()
        return replace(
            self,
            position=self.position + first,
            tokens=self.tokens[first:last],
            logit_rows=logit_rows,
            turns=tuple(each for axis in axes for each in self.turns[axis + first : axis + last]),
            shift=0 if self.turns and last < count else self.shift,
        )

    @property
    def end(self) -> int:
        """The position after the last token, which is the number of tokens in the KV cache after
        the step."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One computation of all shards of a plan: a chunk of one request, one token of several
    requests, one token of a request and a draft, or one token of several requests and a chunk of a
    further one.

    run: above 1, the shards go on by themselves, with each sampled token as the next step's input,
    until `run` tokens are sampled, a request ends, or the sampler is asked to yield.

    drafts: the most tokens of a draft in each step of a run of one request; see `drafted`. The
    tokens before the rows of logits are known, and may have been computed before. A run that gives
    no more tokens than its first step's draft, or has token masks (`RunStep`), ends with its first
    step. A run of several requests has no drafts, and ends where these would be faster in turn,
    each with a draft.

    spare: as many of the last tokens only make the number of rows even, and are cut off again.

    singly: the tokens of each request are known, and are computed one after the other, as those of
    an answer are. So keys and values have the same bits as when the answer was first computed. No
    token is sampled.

    states: the rows that `logit_rows` counts are hidden states after the last norm, the input of
    the head, instead of logits.

    Tokens of several requests and a chunk (`is_mixed`): the chunk is the last entry, and each entry
    wants one row at most. For shards that can (`StageCompute.mixes`). In a run of these, each step
    takes as many tokens of the chunk's request; it ends where one of the other requests does.

    rest: the tokens of the chunk's request for the later steps of a run.
    """

    entries: Annotated[tuple[StepEntry, ...], Meta(max_length=MAX_REQUESTS)]
    run: int = 1
    singly: bool = False
    states: bool = False
    drafts: Annotated[int, Meta(ge=0, le=MOST_DRAFTED)] = 0
    spare: Annotated[int, Meta(ge=0, le=1)] = 0
    rest: Annotated[tuple[Whole, ...], Meta(max_length=MAX_CHUNK_TOKENS)] = ()

    def __post_init__(self) -> None:
        if not self.entries or any(not entry.tokens for entry in self.entries):
            raise ValueError("a step needs at least one request, and each at least one token")
        if self.batch > MAX_REQUESTS or len(self.entries[-1].tokens) > MAX_CHUNK_TOKENS:
            raise ValueError(
                f"a step of more than {MAX_REQUESTS} requests or a chunk of more than "
                f"{MAX_CHUNK_TOKENS} tokens"
            )
        if self.singly:
            self._check_singly()
        elif any(len(entry.tokens) != 1 for entry in self.entries[:-1]):
            raise ValueError("a step of several requests takes one token of all but the last")
        elif self.is_mixed:
            self._check_mixed()
        if len({entry.request for entry in self.entries}) != len(self.entries):
            raise ValueError("a request occurs twice in a step")
        if any(not 0 <= entry.logit_rows <= len(entry.tokens) for entry in self.entries):
            raise ValueError("a step wants more logits than it has tokens")
        if self.states and (self.run != 1 or self.batch != 1 or not self.logit_rows):
            raise ValueError("a step for hidden states needs one request, and cannot be a run")
        if self.drafts:
            if self.states or self.singly or any(not each.logit_rows for each in self.entries):
                raise ValueError("a step with drafts needs logits of each request")
            if self.drafted and self.num_tokens > 1 + self.drafts:
                raise ValueError(f"a step with a draft has {1 + self.drafts} tokens at most")
        elif self.run > 1 and any(e.logit_rows != 1 for e in self.answers):
            raise ValueError("a run needs exactly one row of logits of every request")
        if self.run < 1:
            raise ValueError("a run needs at least one token")
        if self.rest and not self.is_mixed:
            raise ValueError("further tokens of a chunk that is not there")
        if self.spare and (self.batch != 1 or self.logit_rows or self.num_tokens < 2):
            raise ValueError("a spare token needs a step of one request without logits")

    def _check_singly(self) -> None:
        if self.run != 1 or any(entry.logit_rows for entry in self.entries):
            raise ValueError("a step with `singly` cannot sample tokens")
        if any(len(entry.tokens) != self.num_tokens for entry in self.entries):
            raise ValueError("a step needs the same number of tokens of each request")
        if self.batch * self.num_tokens > MAX_CHUNK_TOKENS:
            raise ValueError(f"a step of more than {MAX_CHUNK_TOKENS} tokens")

    def _check_mixed(self) -> None:
        chunk = self.entries[-1]
        if self.drafts or self.spare or self.states:
            raise ValueError("a chunk beside other requests has no drafts and no states")
        if any(entry.logit_rows > 1 for entry in self.entries):
            raise ValueError("a chunk beside other requests: a row of each at most")
        more = (self.run - 1) * len(chunk.tokens)
        if len(self.rest) != more or more > MAX_CHUNK_TOKENS:
            raise ValueError("a run with chunks needs as many tokens for each of its steps")
        if self.rest and (chunk.logit_rows or chunk.turns or chunk.sees_all):
            raise ValueError("a run has chunks of text, and no row of them")
        if self.rows > MAX_CHUNK_TOKENS:
            raise ValueError(f"a step of more than {MAX_CHUNK_TOKENS} tokens")

    @property
    def batch(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of each entry; all entries have the same number, but for the chunk of a step that
        `is_mixed`."""
        return len(self.entries[0].tokens)

    @property
    def is_mixed(self) -> bool:
        """Whether it has a chunk of one request, and one token of each of others."""
        return len(self.entries) > 1 and len(self.entries[-1].tokens) > 1 and not self.singly

    @property
    def answers(self) -> tuple[StepEntry, ...]:
        """The entries whose tokens follow each other in a run: all but a chunk."""
        return self.entries[:-1] if self.is_mixed else self.entries

    @property
    def rows(self) -> int:
        """Tokens of all entries."""
        return self.batch * self.num_tokens + len(self.entries[-1].tokens) - self.num_tokens

    @property
    def shape(self) -> tuple[int, int]:
        """The first two sizes of its hidden states: requests, and tokens of each; of a mixed step
        1, and its tokens one behind the other."""
        return (1, self.rows) if self.is_mixed else (self.batch, self.num_tokens)

    @property
    def logit_rows(self) -> int:
        """Rows of logits that the head computes for each entry: the most that any entry wants."""
        return max(entry.logit_rows for entry in self.entries)

    @property
    def head_rows(self) -> int:
        """Rows that the head computes for each entry: an even number in a step that goes on behind
        wrong guesses, as CPUs round a row alone in another way. The first may be one too many."""
        rows = self.logit_rows
        goes_on = rows < self.num_tokens <= 1 + self.drafts
        return rows + 1 if goes_on and rows % 2 else rows

    @property
    def drafted(self) -> int:
        """Tokens of the draft that the step verifies: the last ones of its only entry. Each row
        gives a token; those that follow the first wrong guess are not used."""
        return self.logit_rows - 1 if self.drafts else 0

    @property
    def ends_at_once(self) -> bool:
        """Whether it gives all tokens of its run, at most."""
        return self.run <= 1 + self.drafted

    @property
    def is_decode(self) -> bool:
        """Whether it computes an answer's tokens, and no chunk of a prompt."""
        return (self.num_tokens == 1 and not self.is_mixed) or self.drafted > 0

    def of_states(self) -> Step:
        """The same chunk of one request, for the hidden states of all of its rows."""
        (entry,) = self.entries
        return Step(entries=(replace(entry, logit_rows=len(entry.tokens)),), states=True)

    def cut(self, tokens: int) -> Step:
        """The step of one request without the last `tokens` tokens, which were cut off again."""
        if not tokens:
            return self
        (entry,) = self.entries
        return replace(
            self,
            entries=(
                entry.part(
                    0,
                    len(entry.tokens) - tokens,
                    logit_rows=max(0, entry.logit_rows - tokens),
                ),
            ),
            spare=0,
        )

    @property
    def apart(self) -> tuple[Step, ...]:
        """The single-token steps of a step with `singly`."""
        return tuple(
            Step(
                entries=tuple(entry.part(index, index + 1, logit_rows=0) for entry in self.entries)
            )
            for index in range(self.num_tokens)
        )

    def following(self, tokens: Sequence[int]) -> Step:
        """The next step of a run, from the token sampled for each entry but a chunk."""
        entries = tuple(
            StepEntry(
                request=entry.request,
                position=entry.end,
                tokens=(token,),
                logit_rows=1,
                shift=entry.shift,
            )
            for entry, token in zip(self.answers, tokens, strict=True)
        )
        rest = self.rest
        if self.is_mixed:
            chunk = self.entries[-1]
            size = len(chunk.tokens)
            entries += (replace(chunk, position=chunk.end, tokens=rest[:size]),)
            rest = rest[size:]
        return Step(entries=entries, run=self.run - 1, drafts=self.drafts, rest=rest)

    def drafting(self, position: int, tokens: Sequence[int], *, rewinds: bool = False) -> Step:
        """A later step of a run with drafts. tokens: the one at `position`, and a draft of those
        after it.

        rewinds: if a guess of this step was wrong, the states are those before it, so that its
        right tokens are computed again.
        """
        (entry,) = self.entries
        first = entry.end - entry.logit_rows
        again = entry.tokens[: position - entry.end] if rewinds and position < entry.end else ()
        return Step(
            entries=(
                StepEntry(
                    request=entry.request,
                    position=position - len(again),
                    tokens=(*again, *tokens),
                    logit_rows=len(tokens),
                    shift=entry.shift,
                ),
            ),
            run=self.run - (position - first),
            drafts=self.drafts,
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
    speculate: Speculation = "off"
    """How drafts are made, in runs that may have some."""


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
    """Saved states that there is room for, in models with recurrent layers, or places for saved
    windows. A prompt that begins like another goes on from one of these."""
    windows: int = 0
    """Requests whose windows have memory of their own, if layers with a sliding window keep the
    newest tokens only. Further windows, and saved ones, take memory of `cached_tokens`. 0: these
    layers keep all tokens."""

    @property
    def state_places(self) -> int:
        """Places for saved states, and behind them one for the state before a step with guesses."""
        return self.saved_states + 1

    @property
    def states(self) -> int:
        """States of requests and in places that there is memory for, in models with recurrent
        layers, and one on its way to or from the prefix cache."""
        return self.requests + self.state_places + 1

    @property
    def caches(self) -> int:
        """Requests that have a KV cache at once."""
        return self.requests + MOST_KEPT

    @property
    def exceeds_memory(self) -> bool:
        """Whether one request may have more tokens than fit into memory."""
        return bool(self.disk_tokens) and self.context_tokens > self.cached_tokens
