"""The text of one answer: tokens in, text out, when it stops, and its figures. Reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from edge.answers.terms import Terms
from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.step import FinishReason
from edge.text import TextStream, Tokenizer

FEWEST_TOKENS_OF_A_RATE = 8
"""Fewest new tokens for a rate: a rate of fewer depends on chance."""


def decode_rate(new_tokens: int, decode_s: float) -> float | None:
    """Tokens per second after the first, of `new_tokens` in all; None for fewer than eight."""
    has_rate = new_tokens >= FEWEST_TOKENS_OF_A_RATE and decode_s > 0
    return (new_tokens - 1) / decode_s if has_rate else None


class Statistics(TypedDict):
    """Measurements of one reply, and the prediction for a reply of its lengths that runs alone."""

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    """From the request to the arrival of the first token."""
    decode_s: float
    """From the first token to the last, by the clock of the device that chooses them."""
    tokens_per_s: float | None
    """After the first token; None under eight tokens."""
    total_s: float
    seed: int
    found_tokens: NotRequired[int]
    """Tokens of the prompt that peers found in a prefix cache and did not compute."""
    resumed_tokens: NotRequired[int]
    """Tokens that a resumed reply already had. Times and rate count the rest."""
    predicted_first_token_s: NotRequired[float]
    """Like the next two, only where the devices were measured."""
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
    """When it was chosen, by `time.monotonic` of this process; at most one message time before it
    arrived. 0 for a token that a resumed reply already had."""
    logprob: float | None = None
    """Log softmax of the model's own logits, in nats, before penalties, temperature and filters;
    None unless `logprobs` asked for it."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in this place, as many as `logprobs` asked for."""
    stopped_by: str | None = None
    """The stop string that ends the reply here, where one does."""


class AnswerText:
    """The text of one answer so far. `push` each sampled token in order."""

    def __init__(
        self,
        terms: Terms,
        tokenizer: Tokenizer | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.terms = terms
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        """One for each token so far, like the next, where `logprobs` asked for them."""
        self.top_logprobs: list[tuple[TokenLogprob, ...]] = []
        self.finish_reason: FinishReason | None = None
        self._restored = 0
        self._clock = clock
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, terms.prompt, terms.stop) if tokenizer else None
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
        """Take the next token.

        end: why the answer ends with it, as far as tokens alone tell; a stop string may end it,
        too. chosen_s: when it was chosen. Tokens arrive in bursts where the loop is busy, so rates
        count the times of choosing.
        """
        self._last_s = self._clock()
        self._last_chosen_s = chosen_s
        if len(self.token_ids) == self._restored:
            self._first_s, self._first_chosen_s = self._last_s, chosen_s
        return self._take(token_id, end, chosen_s, logprobs)

    def restore(self, token_id: int, end: FinishReason | None, logprobs: Logprobs | None) -> Token:
        """Take a token that a resumed answer already had. No time is counted for it."""
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
        """Measurements so far."""
        new = len(self.token_ids) - self._restored
        decode_s = self._last_chosen_s - self._first_chosen_s
        statistics = Statistics(
            prompt_tokens=len(self.terms.prompt),
            new_tokens=len(self.token_ids),
            first_token_s=self._first_s - self._started_s,
            decode_s=decode_s,
            tokens_per_s=decode_rate(new, decode_s),
            total_s=self._last_s - self._started_s,
            seed=self.terms.sampling.seed,
        )
        if self._restored:
            statistics["resumed_tokens"] = self._restored
        return statistics
