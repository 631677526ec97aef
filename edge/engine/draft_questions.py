"""Questions of a sampler to a draft model, and the answers, as messages of a link.

Every message has a known size, and its numbers are checked before memory is spent on them. There
is one question under way at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge.protocol.step import MOST_DRAFTED
from edge.transport import Link, ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuestion:
    """The tokens of a request, and how many guesses are wanted."""

    kept: int
    """The first tokens that are those of the question before."""
    tokens: Sequence[int]
    """The tokens after them."""
    most: int
    ahead: int
    """Guesses behind those that are made before the next question, while nothing else is asked."""


def send_question(link: Link, question: DraftQuestion) -> None:
    head = [question.kept, len(question.tokens), question.most, question.ahead]
    link.send(np.array(head, np.int64))
    link.send(np.array(question.tokens, np.int64))


def receive_question(link: Link, *, context_tokens: int, vocab_size: int) -> DraftQuestion:
    """Raises ProtocolError for a question that a draft model of this size cannot be asked."""
    head = np.empty(4, np.int64)
    link.receive(head)
    kept, count, most, ahead = head.tolist()
    if kept < 0 or count < 0 or not 0 < kept + count <= context_tokens:
        raise ProtocolError(f"tokens {kept} to {kept + count} of a context of {context_tokens}")
    if not (0 < most <= MOST_DRAFTED and 0 <= ahead <= 1 + MOST_DRAFTED):
        raise ProtocolError(f"drafts of {most} tokens, and of {ahead} ahead")
    tokens = np.empty(count, np.int64)
    link.receive(tokens)
    if not ((tokens >= 0) & (tokens < vocab_size)).all():
        raise ProtocolError(f"tokens outside a vocabulary of {vocab_size}")
    return DraftQuestion(kept=kept, tokens=tokens.tolist(), most=most, ahead=ahead)


def send_answer(link: Link, guesses: Sequence[int]) -> None:
    told = np.zeros(1 + MOST_DRAFTED, np.int64)
    told[: 1 + len(guesses)] = [len(guesses), *guesses]
    link.send(told)


def receive_answer(link: Link, *, most: int, vocab_size: int) -> list[int]:
    """Raises ProtocolError for more guesses than were asked for, or ids that are no tokens."""
    told = np.empty(1 + MOST_DRAFTED, np.int64)
    link.receive(told)
    count = int(told[0])
    if not 0 <= count <= most:
        raise ProtocolError(f"{count} guesses where {most} were asked for")
    guesses: list[int] = told[1 : 1 + count].tolist()
    if any(not 0 <= each < vocab_size for each in guesses):
        raise ProtocolError(f"guesses outside a vocabulary of {vocab_size}")
    return guesses
