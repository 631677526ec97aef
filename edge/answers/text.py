"""The text of one answer: tokens in, text out, when it stops, and its figures. Reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from edge.answers.terms import Terms
from edge.kernels.sampling.logprobs import Logprobs
from edge.protocol.step import FinishReason
from edge.text import TextStream, Tokenizer
from edge.text.answer_parser import whole_answer
from edge.text.answer_parts import AnswerPart, ReadAnswer, Said
from edge.text.answer_stream import AnswerStream

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
    drafted_tokens: NotRequired[int]
    """Tokens that were guessed, if any were, and verified; like the next two since the last loss of
    a coordinator."""
    accepted_tokens: NotRequired[int]
    """Guesses that were right."""
    tokens_per_pass: NotRequired[float]
    """New tokens for each pass over the weights, on average."""
    tiles_read: NotRequired[int]
    """Tiles of pictures that were read for this prompt and not for an earlier one; like the next
    two only where the prompt has pictures."""
    pictures_s: NotRequired[float]
    """Until all rows of pictures were there, the loading of the tower included."""
    predicted_pictures_s: NotRequired[float | None]
    """Predicted seconds of reading alone; None where the rates of the devices that read are not
    known."""
    resumed_tokens: NotRequired[int]
    """Tokens that a resumed reply already had. Times and rate count the rest."""
    predicted_first_token_s: NotRequired[float]
    """Like the next two, only where the devices were measured. Reading pictures is a part of
    it."""
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
    bytes: bytes
    """The token's own bytes, which may be a part of a character."""
    is_special: bool = False
    """The token has no place in the text of an answer."""


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
    parts: tuple[AnswerPart, ...] = ()
    """In a conversation, what is thought, said and called up to this token and was not told before;
    else `text` as said."""
    chosen: TokenLogprob | None = None
    """The token by itself, where `logprobs` asked for it."""


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
        reading = terms.reading
        stop = terms.stop if reading is None else ()
        self._decoded = TextStream(tokenizer, terms.prompt_tokens, stop) if tokenizer else None
        self._parts = None if reading is None else AnswerStream(reading.parser(), terms.stop)
        self._text: list[str] = []
        self._told: list[AnswerPart] = []
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
        text, parts = self._read(token_id, is_last=end is not None)
        stopped_by = self._stopped_by
        self.finish_reason = end if stopped_by is None else "stop"
        self._text.append(text)
        self._told += parts
        chosen = None
        if logprobs is not None:
            chosen = self._logprob(token_id, logprobs.logprob)
            self.logprobs.append(chosen)
            self.top_logprobs.append(tuple(self._logprob(*each) for each in logprobs.top))
        return Token(
            token_id=token_id,
            text=text,
            finish_reason=self.finish_reason,
            chosen_s=chosen_s,
            logprob=None if logprobs is None else logprobs.logprob,
            top_logprobs=() if logprobs is None else self.top_logprobs[-1],
            stopped_by=stopped_by,
            parts=tuple(parts),
            chosen=chosen,
        )

    def _read(self, token_id: int, *, is_last: bool) -> tuple[str, Sequence[AnswerPart]]:
        """The text and the parts that this token settles."""
        if self._decoded is None:
            return "", ()
        text = self._decoded.push(token_id)
        if self._parts is None:
            if is_last or self._decoded.stopped:
                text += self._decoded.finish()
            return text, (Said(text),) if text else ()
        text, parts = self._parts.push(text)
        if is_last and self._parts.stopped_by is None:
            for more, found in (self._parts.push(self._decoded.finish()), self._parts.finish()):
                text += more
                parts += found
        return text, parts

    @property
    def _stopped_by(self) -> str | None:
        stream = self._decoded if self._parts is None else self._parts
        return None if stream is None else stream.stopped_by

    def _logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        if self._tokenizer is None:
            return TokenLogprob(token_id=token_id, text="", logprob=logprob, bytes=b"")
        vocabulary = self._tokenizer.vocabulary
        text = vocabulary.text_of(token_id)
        own = vocabulary.own_bytes(token_id)
        return TokenLogprob(
            token_id=token_id,
            text=text,
            logprob=logprob,
            bytes=text.encode() if own is None else own,
            is_special=vocabulary.piece(token_id) is None,
        )

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def answer(self) -> ReadAnswer:
        """The answer so far; outside a conversation all of it is content."""
        return whole_answer(self._told)

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
