"""A draft model at work: a small model that guesses what a larger one says next.

It has the tokens of one request, and continues them greedily. After an answer it drafts on from its
own guesses (Liu et al., 2024: PEARL), so that the next answer is there at once if they were right.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from edge.backends.interface import StageProgram, StepLogits
from edge.engine.draft_questions import DraftQuestion, receive_question, send_answer
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import Link, ProtocolError, SoloCollective, TransportError

_REQUEST = "draft"
_ALONE = SoloCollective()

_log = logging.getLogger(__name__)

Post = Callable[[Callable[[StageProgram | None], None]], None]


class DraftServer:
    """Answers the questions that come over one link, until it ends. Its link is its own.

    A thread of its own receives; the compute thread computes, one step at a time.
    """

    def __init__(self, link: Link, limits: StepLimits, vocab_size: int, post: Post) -> None:
        """post: queues work of the compute thread."""
        self._link = link
        self._limits = limits
        self._vocab_size = vocab_size
        self._post = post
        self._mutex = threading.Lock()
        self._question: DraftQuestion | None = None
        """The question that was not taken yet."""
        self._asked: DraftQuestion | None = None
        """The question that was taken last."""
        self._is_awaited = False
        """It is not answered yet."""
        self._is_posted = False
        self._is_closed = False
        self._told: list[int] = []
        """The tokens of the request."""
        self._guesses: list[int] = []
        """What may follow them."""
        self._computed = 0
        """Tokens, guesses included, whose keys and values are right."""
        self._held = 0
        """Tokens whose keys and values are there."""
        self._thread = threading.Thread(target=self._receive, name="edge-drafts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the link, and compute nothing more. For any thread; may be called again."""
        self._is_closed = True
        self._link.close()

    def _receive(self) -> None:
        try:
            while True:
                question = receive_question(
                    self._link,
                    context_tokens=self._limits.context_tokens,
                    vocab_size=self._vocab_size,
                )
                with self._mutex:
                    if self._question is not None or self._is_awaited:
                        raise ProtocolError("a question before the last one was answered")
                    self._question = question
                self._wake()
        except TransportError as error:
            _log.info("no more drafts are asked for: %s", error)
            self._link.close()

    def _wake(self) -> None:
        with self._mutex:
            if self._is_posted:
                return
            self._is_posted = True
        self._post(self._advance)

    def _advance(self, program: StageProgram | None) -> None:
        """Compute at most one step, and come again if there is more to do."""
        with self._mutex:
            self._is_posted = False
            question, self._question = self._question, None
            if question is not None:
                self._asked, self._is_awaited = question, True
        if program is None or self._is_closed:
            return
        try:
            if question is not None:
                self._take(question)
            self._tell_if_ready()
            if not self._is_done:
                self._compute(program)
                self._tell_if_ready()
        except TransportError as error:
            _log.info("a draft was not sent: %s", error)
            self._link.close()
            return
        if not self._is_done:
            self._wake()

    def _take(self, question: DraftQuestion) -> None:
        """Keep what agrees with the tokens of the question."""
        kept, tokens = question.kept, list(question.tokens)
        if kept > len(self._told):
            raise ProtocolError(f"{kept} tokens of {len(self._told)}")
        if kept < len(self._told):
            del self._told[kept:]
            self._guesses.clear()
        right = 0
        for guess, token in zip(self._guesses, tokens, strict=False):
            if guess != token:
                break
            right += 1
        self._told += tokens
        if right == len(tokens):
            del self._guesses[:right]
        else:
            self._guesses.clear()
            self._computed = min(self._computed, kept + right)
        if not self._guesses:  # what follows the last token is not known
            self._computed = min(self._computed, len(self._told) - 1)

    @property
    def _wanted(self) -> int:
        """Guesses that are wanted by now."""
        if self._asked is None:
            return 0
        room = self._limits.context_tokens - len(self._told)
        return max(0, min(self._asked.most + self._asked.ahead, room))

    @property
    def _is_done(self) -> bool:
        return len(self._guesses) >= self._wanted

    def _tell_if_ready(self) -> None:
        """Answer the question once there are enough guesses, or at once if that would take several
        chunks."""
        asked = self._asked
        if self._is_awaited and asked is not None:
            left = len(self._told) - self._computed
            if left > self._limits.chunk_tokens:
                self._tell([])
            elif len(self._guesses) >= min(asked.most, self._wanted):
                self._tell(self._guesses[: asked.most])

    def _tell(self, guesses: list[int]) -> None:
        with self._mutex:  # before it is sent: the next question may come at once
            self._is_awaited = False
        send_answer(self._link, guesses)

    def _compute(self, program: StageProgram) -> None:
        if not self._computed:
            program.release(_REQUEST)
        elif self._computed < self._held:
            program.cut(_REQUEST, self._computed)
        known = len(self._told)
        chunk = self._told[self._computed : self._computed + self._limits.chunk_tokens]
        if self._computed + len(chunk) >= known:
            behind = max(0, self._computed - known)
            chunk += self._guesses[behind : behind + self._limits.chunk_tokens - len(chunk)]
        ends = self._computed + len(chunk) == known + len(self._guesses)
        entry = StepEntry(
            request=_REQUEST,
            position=self._computed,
            tokens=tuple(chunk),
            logit_rows=int(ends),
        )
        logits = program.logits(Step(entries=(entry,)), None, _ALONE)
        self._computed += len(chunk)
        self._held = self._computed
        if ends:
            self._guesses.append(_likeliest(logits))


def _likeliest(logits: StepLogits) -> int:
    if logits.can_rank and (best := logits.best(1)) is not None and best[0][0, 0] >= 0:
        return int(best[0][0, 0])
    return int(np.argmax(logits.array()[0, -1]))
