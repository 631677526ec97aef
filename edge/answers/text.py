"""One reply in the making: tokens in, text out, and when to stop. Pure but for clock and seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from edge.errors import RequestError, shown
from edge.kernels.sampling.logprobs import MOST_LOGPROBS, Logprobs
from edge.kernels.sampling.parameters import SamplingParameters
from edge.protocol.step import FinishReason, SamplingTerms
from edge.text import TextStream, Tokenizer
from edge.text.grammar import Grammar

FEWEST_TOKENS_OF_A_RATE = 8
"""Fewest new tokens for a rate: with fewer it tells of the moment more than of the model."""


def decode_rate(new_tokens: int, decode_s: float) -> float | None:
    """Tokens per second after the first, of this number in all; None of too few to tell."""
    has_rate = new_tokens >= FEWEST_TOKENS_OF_A_RATE and decode_s > 0
    return (new_tokens - 1) / decode_s if has_rate else None


class Statistics(TypedDict):
    """Measurements of one reply, and what was predicted of one of its lengths that runs alone."""

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    """From asking to the arrival of the first token."""
    decode_s: float
    """From the first token to the last, where they are chosen."""
    tokens_per_s: float | None
    """After the first token; None under eight tokens."""
    total_s: float
    seed: int
    found_tokens: NotRequired[int]
    """Tokens of the prompt whose keys and values peers had from before: they were not computed."""
    resumed_tokens: NotRequired[int]
    """Tokens that a resumed reply already had. Times and rate are of the rest."""
    predicted_first_token_s: NotRequired[float]
    """Where the devices were measured, like the next."""
    predicted_tokens_per_s: NotRequired[float]
    predicted_tokens_per_s_range: NotRequired[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely the model found a token in its place, in nats.

    `text` is the token's own: a part of a character is U+FFFD, and a special token is spelt out.
    """

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token.

    `text` is what may be shown now: it can be empty while a character or a possible stop string is
    incomplete, and then comes with a later token.
    """

    token_id: int
    text: str
    finish_reason: FinishReason | None
    chosen_s: float
    """When it was chosen, by `time.monotonic` here: not after it came, and earlier by less than the
    messages take that tell it. 0 of one that was there before the reply was gone on with."""
    logprob: float | None = None
    """How likely the model found it, in nats, where `logprobs` asked for that: the log softmax of
    its own logits, before penalties, temperature and filters."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """The tokens that it found the likeliest in this place, as many as were asked for."""
    stopped_by: str | None = None
    """The stop string that ends the reply here, where one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the user asked for, checked."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParameters
    stop: tuple[str, ...] = ()
    end_ids: frozenset[int] = field(default_factory=frozenset)
    logprobs: int | None = None
    grammar: Grammar | None = None
    """What the answer must be."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens must be 1 or more, not {shown(self.max_new_tokens)}"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("stop strings must be texts that are not empty")
        asked = self.logprobs
        if asked is not None and (type(asked) is not int or not 0 <= asked <= MOST_LOGPROBS):
            raise RequestError(
                f"logprobs must be 0 to {MOST_LOGPROBS}, or None, not {shown(asked)}"
            )

    @property
    def terms(self) -> SamplingTerms:
        return SamplingTerms(
            sampling=self.sampling,
            end_ids=self.end_ids,
            max_new_tokens=self.max_new_tokens,
            prompt_tokens=len(self.prompt_ids),
            logprobs=self.logprobs,
        )


class AnswerText:
    """The state of one reply. `push` each sampled token in order."""

    def __init__(
        self,
        request: Terms,
        tokenizer: Tokenizer | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        """One for each token so far, where they were asked for, like the next."""
        self.top_logprobs: list[tuple[TokenLogprob, ...]] = []
        self.finish_reason: FinishReason | None = None
        self._restored = 0
        self._clock = clock
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, request.prompt_ids, request.stop) if tokenizer else None
        self._started_s = clock()
        self._first_s = self._last_s = self._started_s
        self._first_chosen_s = self._last_chosen_s = 0.0

    def push(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None = None,
    ) -> Token:
        """Take the next token, and why the reply ends with it where its text does not tell.

        chosen_s: when it was chosen. Tokens arrive in bursts where the loop is busy, so the rate
        is that of choosing.
        """
        self._last_s = self._clock()
        self._last_chosen_s = chosen_s
        if len(self.token_ids) == self._restored:
            self._first_s, self._first_chosen_s = self._last_s, chosen_s
        return self._take(token_id, end, chosen_s, logprobs)

    def restore(self, token_id: int, end: FinishReason | None, logprobs: Logprobs | None) -> Token:
        """Likewise a token of an answer that is gone on with. No time is counted for it."""
        self._restored += 1
        return self._take(token_id, end, 0.0, logprobs)

    def _take(
        self,
        token_id: int,
        end: FinishReason | None,
        chosen_s: float,
        logprobs: Logprobs | None,
    ) -> Token:
        self.token_ids.append(token_id)
        text = self._text.push(token_id) if self._text else ""
        self.finish_reason = "stop" if self._text is not None and self._text.stopped else end
        if self.finish_reason is not None and self._text is not None:
            text += self._text.finish()
        if logprobs is not None:
            self.logprobs.append(self._logprob(token_id, logprobs.logprob))
            self.top_logprobs.append(tuple(self._logprob(*each) for each in logprobs.top))
        return Token(
            token_id=token_id,
            text=text,
            finish_reason=self.finish_reason,
            chosen_s=chosen_s,
            logprob=None if logprobs is None else logprobs.logprob,
            top_logprobs=() if logprobs is None else self.top_logprobs[-1],
            stopped_by=None if self._text is None else self._text.stopped_by,
        )

    def _logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self._tokenizer.vocabulary.text_of(token_id) if self._tokenizer else ""
        return TokenLogprob(token_id=token_id, text=text, logprob=logprob)

    @property
    def text(self) -> str:
        return self._text.text if self._text else ""

    def statistics(self) -> Statistics:
        """What there is to measure of it."""
        new = len(self.token_ids) - self._restored
        decode_s = self._last_chosen_s - self._first_chosen_s
        statistics = Statistics(
            prompt_tokens=len(self.request.prompt_ids),
            new_tokens=len(self.token_ids),
            first_token_s=self._first_s - self._started_s,
            decode_s=decode_s,
            tokens_per_s=decode_rate(new, decode_s),
            total_s=self._last_s - self._started_s,
            seed=self.request.sampling.seed,
        )
        if self._restored:
            statistics["resumed_tokens"] = self._restored
        return statistics
