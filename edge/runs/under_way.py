"""The answers of a run: terms that peers have not got yet, grammar masks, rows and copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.answers.answer import Answer
from edge.answers.copies import AnswerCopies, Copy, KvLayout
from edge.answers.terms import Terms
from edge.errors import ProtocolError
from edge.kernels.sampling.logprobs import Logprobs
from edge.kernels.sampling.rules import Bits
from edge.planning.kv_copies import MOST_KEPT_KV_BYTES
from edge.protocol.assignment import Copies
from edge.protocol.kv_frames import KvRows
from edge.protocol.step import Guesses, SamplingTerms, Step
from edge.protocol.topology import Seat
from edge.scheduling.prefixes import common_tokens
from edge.text.grammar import Matcher
from edge.transport.frame import Buffer


class AnswersUnderWay:
    """The unfinished answers of one run, by id."""

    def __init__(self, vocab_size: int, hidden_size: int, copies: Copies) -> None:
        """copies: which keys and values the peers send copies of."""
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self._copies = copies
        self.kv_layout: KvLayout | None = None
        """The layout of keys and values that this run sends copies of; None: it sends none."""
        self._answers: dict[str, Answer] = {}
        self._unannounced: dict[str, SamplingTerms] = {}
        """Terms of answers that were not sent to the peers yet."""
        self._masks: dict[str, Bits] = {}
        """Tokens that the grammar of an answer allows next."""
        self._rows: dict[str, list[NDArray[np.float32]]] = {}
        """The rows of each prompt that have arrived so far."""

    def __contains__(self, id: str) -> bool:
        return id in self._answers

    def __iter__(self) -> Iterator[Answer]:
        return iter(tuple(self._answers.values()))

    def get(self, id: str) -> Answer | None:
        return self._answers.get(id)

    def shared_tokens(self, terms: Terms) -> int:
        """The longest beginning that a prompt has in common with one of an answer here."""
        prompt = np.asarray(terms.prompt, np.int64)
        others = (each.terms for each in self._answers.values())
        alike = (
            np.asarray(each.prompt, np.int64)
            for each in others
            if not (each.rows or terms.rows) and each.cache_salt == terms.cache_salt
        )
        return max((common_tokens(prompt, other) for other in alike), default=0)

    def add(self, answer: Answer) -> None:
        self._answers[answer.id] = answer
        if answer.terms.rows is None:
            self._unannounced[answer.id] = answer.terms.for_sampler(len(answer.tokens))

    def forget(self, id: str) -> Answer | None:
        """Remove an answer; None if it is not there."""
        self._rows.pop(id, None)
        self._masks.pop(id, None)
        forgotten = self._answers.pop(id, None)
        if forgotten is not None:
            forgotten.copies = None  # frees megabytes; the caller may keep the answer
        return forgotten

    def take_all(self) -> tuple[Answer, ...]:
        """Remove all answers, with their copies."""
        unfinished = tuple(self._answers.values())
        self._answers.clear()
        return unfinished

    def freed(self, id: str) -> None:
        """Drop the unsent terms of an answer."""
        self._unannounced.pop(id, None)

    def announced(self, step: Step) -> dict[str, SamplingTerms]:
        """Terms that are sent with this step, because it is the first one of their answers."""
        # This includes cancelled answers, because peers learn of that after the step.
        new = [each.request for each in step.entries if each.request in self._unannounced]
        return {name: self._unannounced.pop(name) for name in new}

    def masks_of(self, step: Step) -> dict[str, list[Bits]]:
        """Tokens that grammars allow after this step, by answer; of a step with a draft, behind
        each token of it as well, up to the first that is not allowed."""
        masks: dict[str, list[Bits]] = {}
        for entry in step.entries:
            answer = self._answers.get(entry.request)
            if entry.logit_rows and answer is not None and answer.matcher is not None:
                guesses = entry.tokens[len(entry.tokens) - step.drafted :][: step.run - 1]
                behind = answer.matcher.allowed_after(guesses) if guesses else []
                masks[answer.id] = [self._masks[answer.id], *behind]
        return masks

    def allow(self, answer: Answer, matcher: Matcher) -> None:
        """Store the tokens that the answer's grammar allows next. Raises EdgeError if it fails."""
        self._masks[answer.id] = matcher.allowed()

    def check_ids(self, tokens: Sequence[int], guesses: Sequence[Guesses] = ()) -> None:
        """Raises ProtocolError for a token, or a guess, outside the vocabulary."""
        for token in itertools.chain(tokens, *(each.tokens for each in guesses)):
            if token >= self._vocab_size:
                raise ProtocolError(f"token {token} is outside a vocabulary of {self._vocab_size}")

    def check_token(
        self, answer: Answer, count: int, is_last: bool, logprobs: Logprobs | None
    ) -> None:
        """Raises ProtocolError for a token that cannot be the answer's next one, or the one of that
        count among several."""
        if not is_last and len(answer.tokens) + count >= answer.terms.max_new_tokens:
            raise ProtocolError("the answer must end with its last token")
        asked = answer.terms.logprobs
        if (asked is None) != (logprobs is None):
            raise ProtocolError("logprobs are missing, or were not asked for")
        if asked is None or logprobs is None:
            return
        if len(logprobs.top) != min(asked, self._vocab_size):
            raise ProtocolError(
                f"{len(logprobs.top)} likeliest tokens instead of the requested {asked}"
            )
        if any(each >= self._vocab_size for each, _logprob in logprobs.top):
            raise ProtocolError(f"a likeliest token outside a vocabulary of {self._vocab_size}")

    def check_rows(self, step: Step, content: Buffer, *, states: bool) -> NDArray[np.float32]:
        """The reported rows of a step [rows, columns]. Raises ProtocolError for any others."""
        columns = self._hidden_size if states else self._vocab_size
        rows = np.frombuffer(content, np.float32)
        if step.states != states or rows.size != step.logit_rows * columns:
            raise ProtocolError(f"{rows.size} values for {step.logit_rows} rows of {columns}")
        return rows.reshape(step.logit_rows, columns)

    def add_rows(self, answer: Answer, end: int, rows: NDArray[np.float32]) -> None:
        """Add rows of the prompt, up to token `end`. The sink gets all rows after the last ones."""
        parts = self._rows.setdefault(answer.id, [])
        parts.append(rows)
        if end == len(answer.terms.prompt):
            self.forget(answer.id)
            answer.sink.rows(np.concatenate(parts))

    def restored_tokens(self, answer: Answer) -> int:
        """The number of tokens whose keys and values are restored from the answer's copies. The
        answer collects the copies of this run from here on."""
        copies, layout = answer.copies, self.kv_layout
        answer.copies = None
        if layout is None or answer.terms.rows is not None:
            return 0
        prompt, answered = len(answer.terms.prompt), len(answer.tokens)
        if copies is not None and copies.form.serves(layout):
            last = copies.last(prompt + answered - 1)
            if last > prompt:
                answer.copies = copies.put_into(layout, last)
                return last
        first = 0 if self._copies == "all" else prompt
        answer.copies = AnswerCopies(form=layout, first=first)
        return 0

    def keep_copies(self, seat: Seat, event: KvRows) -> None:
        """Keep the copies that a shard has sent, up to a limit of bytes."""
        room = MOST_KEPT_KV_BYTES[self._copies]
        room -= sum(each.copies.num_bytes for each in self if each.copies)
        for part, rows in event.each():
            answer = self._answers.get(part.request)
            if answer is None or answer.copies is None or len(rows) > room:
                continue  # the answer has ended, or the limit is reached
            # The sampler has another connection and may report these tokens later.
            copy = Copy(first=part.first, tokens=part.tokens, rows=bytes(rows))
            if answer.copies.add(seat, copy):
                room -= len(rows)
