"""Drafts of a small model, as its larger one's sampler asks for them.

A thread talks with the device that drafts. The compute thread waits for guesses only as long as the
steps take that they may save: a device that is slow, or gone, only means that there are none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from edge.engine.draft_questions import DraftQuestion, receive_answer, send_question
from edge.transport import Link, TransportError

_NEWEST, _MOST_SLOWER = 0.3, 4.0
"""Weight of the newest time in a mean. A slower step than this multiple of the mean is an outlier:
others were computed meanwhile."""

_FIRST_STEP_S = 0.02
"""The time of a step before one was timed."""

_LEAST_WAIT_S, _LONGEST_WAIT_S = 0.005, 1.0
"""Limits of a wait: systems give a thread its turn some milliseconds late."""

_MOST_UNWAITED = 16
"""Steps without a wait after answers that came late, one after the other: 1, 2, 4, up to this."""

_log = logging.getLogger(__name__)


class DraftModel:
    """A Drafter that asks a draft model. Without a link it guesses nothing."""

    looks_back = False

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: ids below it are tokens of the large model."""
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._link: Link | None = None
        self._ahead = False
        self._context_tokens = self._own_vocab = 0
        """Sizes of the draft model."""
        self._is_unfit = False
        """The request has a token that the draft model does not know."""
        self._request: str | None = None
        self._end = 0
        """Its tokens that are told, or wait to be told."""
        self._told = 0
        """Its tokens that are told."""
        self._untold: list[int] = []
        self._most = self._more = 0
        self._asked = self._answered = 0
        """Number of questions, and of the last one that is answered."""
        self._is_sent = True
        """The newest question is under way, or answered."""
        self._guesses: list[int] = []
        """The last answer."""
        self._step_s = _FIRST_STEP_S
        self._left_s: float | None = None
        self._guess_s = 0.0
        self._unwaited = self._late = 0
        """Steps that do not wait, and answers that came late, one after the other."""

    @property
    def guess_s(self) -> float:
        """See Drafter."""
        return self._guess_s

    def connect(self, link: Link, *, context_tokens: int, vocab_size: int, ahead: bool) -> None:
        """Ask over this link from now on, which is owned. context_tokens, vocab_size: those of the
        draft model. ahead: it may go on while a step runs, because it does not take the processor
        from it."""
        with self._changed:
            before, self._link, self._ahead = self._link, link, ahead
            self._context_tokens, self._own_vocab = context_tokens, vocab_size
            self._request, self._is_sent = None, True
            self._unwaited = self._late = 0
            self._changed.notify_all()
        if before is not None:
            before.close()
        threading.Thread(target=self._talk, args=(link,), name="edge-asks", daemon=True).start()

    def close(self) -> None:
        """End the link. May be called again, and from any thread."""
        with self._changed:
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            link.close()

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        """See Drafter. A draft model with a device of its own computes the prompt meanwhile."""
        with self._changed:
            if self._link is not None and self._ahead and self._add(request, tokens, len(tokens)):
                self._ask(1, ahead=0)

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        """See Drafter. Waits for guesses if the last ones came in time."""
        now_s = time.perf_counter()
        with self._changed:
            if self._link is None or most < 1:
                return ()
            if self._left_s is not None and self._request == request:
                step_s = min(now_s - self._left_s, _MOST_SLOWER * self._step_s)
                self._step_s += _NEWEST * (step_s - self._step_s)
            if not self._add(request, tokens, end):
                return ()
            # Each right guess saves a step, so longer waits cannot pay.
            wait_s = min(max(most * self._step_s, _LEAST_WAIT_S), _LONGEST_WAIT_S)
            waits = not self._unwaited
            number = self._ask(most, ahead=1 + most if self._ahead else 0)
            found = self._await(number, wait_s)
            took_s = time.perf_counter() - now_s
            if waits:
                self._guess_s += _NEWEST * (took_s / most - self._guess_s)
            self._left_s = now_s + took_s
            return found

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        """Ignored: the next tokens tell it."""

    def forget(self, request: str) -> None:
        with self._changed:
            if self._request == request:
                self._request = self._left_s = None

    def _add(self, request: str, tokens: Sequence[int], end: int) -> bool:
        """Add the newest tokens to those that wait to be told. False: the draft model cannot
        continue them."""
        if request != self._request:
            self._request, self._end, self._told = request, 0, 0
            self._untold, self._is_unfit = [], False
        if end > self._end:
            new = list(tokens[self._end : end])
            self._untold += new
            self._is_unfit |= max(new) >= self._own_vocab
            self._end = end
        return end <= self._context_tokens and not self._is_unfit

    def _ask(self, most: int, *, ahead: int) -> int:
        """Ask for guesses, and for some ahead. Returns the number of the question."""
        self._most, self._more = most, ahead
        self._asked += 1
        self._is_sent = False
        self._changed.notify_all()
        return self._asked

    def _await(self, number: int, within_s: float) -> Sequence[int]:
        """The guesses of this question, if they come in time."""
        if self._unwaited:
            self._unwaited -= 1
            return ()
        until_s = time.perf_counter() + within_s
        while self._answered != number and self._link is not None:
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        if self._link is None:
            return ()
        if self._answered == number:
            self._late = 0
            return self._guesses
        self._late += 1
        self._unwaited = min(1 << min(self._late - 1, 16), _MOST_UNWAITED)
        return ()

    def _talk(self, link: Link) -> None:
        try:
            while (asked := self._next(link)) is not None:
                number, question = asked
                send_question(link, question)
                guesses = receive_answer(link, most=question.most, vocab_size=self._vocab_size)
                with self._changed:
                    self._answered, self._guesses = number, guesses
                    self._changed.notify_all()
        except (TransportError, ValueError) as error:
            _log.info("the draft model does not answer any more: %s", error)
        finally:
            link.close()
            with self._changed:
                if self._link is link:
                    self._link = None
                self._changed.notify_all()

    def _next(self, link: Link) -> tuple[int, DraftQuestion] | None:
        """The newest question and its number, once it is asked; None: the link is over."""
        with self._changed:
            while self._is_sent:
                if self._link is not link:
                    return None
                self._changed.wait()
            if self._link is not link:
                return None
            tokens, self._untold = self._untold, []
            question = DraftQuestion(
                kept=self._told,
                tokens=tokens,
                most=self._most,
                ahead=self._more,
            )
            self._told += len(tokens)
            self._is_sent = True
            return self._asked, question
