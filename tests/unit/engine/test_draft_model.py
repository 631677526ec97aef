"""A draft model guesses the tokens of a request, is corrected, comes late, and gets lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edge.backends.interface import HostLogits
from edge.engine.compute_thread import ComputeThread
from edge.engine.draft_model import DraftModel
from edge.engine.draft_questions import DraftQuestion, receive_answer, send_answer, send_question
from edge.engine.draft_server import DraftServer
from edge.engine.drafter import SuffixLookup
from edge.engine.speculation import Speculator
from edge.partition import draft_length
from edge.protocol.step import MOST_DRAFTED, Step, StepLimits
from edge.transport import Link, PeerLostError
from tests.support.transport_pairs import link_ends
from tests.unit.engine.test_speculation import terms, timed

VOCAB = 500
LIMITS = StepLimits(context_tokens=96, chunk_tokens=8, requests=1, cached_tokens=96)


def following(tokens: Sequence[int]) -> int:
    """What the made-up draft model says next: it follows from all tokens."""
    found = 7
    for token in tokens:
        found = (31 * found + token + 1) % VOCAB
    return found


def continued(tokens: Sequence[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(following(known))
    return known[len(tokens) :]


class MadeUp:
    """A program that checks what it is given."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self.steps: list[Step] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def logits(self, step: Step, hidden: None, collective: object) -> HostLogits:
        assert self.may_go_on.wait(20)
        (entry,) = step.entries
        assert entry.position == len(self.known)
        assert entry.end <= LIMITS.context_tokens
        assert len(entry.tokens) <= LIMITS.chunk_tokens
        self.known = [*self.known[: entry.position], *entry.tokens]
        self.steps.append(step)
        found = np.zeros((1, entry.logit_rows, VOCAB), np.float32)
        if entry.logit_rows:
            found[0, -1, following(self.known)] = 1
        return HostLogits(found, found)

    def cut(self, request: str, tokens: int) -> None:
        assert 0 < tokens < len(self.known)
        del self.known[tokens:]

    def release(self, request: str) -> None:
        self.known.clear()

    @property
    def computed(self) -> int:
        return sum(step.num_tokens for step in self.steps)


@contextlib.contextmanager
def served(
    *, ahead: bool = False, vocab_size: int = VOCAB, program: MadeUp | None = None
) -> Iterator[tuple[DraftModel, MadeUp, Link]]:
    asks, answers = link_ends("memory")
    program = program or MadeUp()
    thread = ComputeThread("drafts", at_end=lambda: None)
    server = DraftServer(
        answers,
        LIMITS,
        VOCAB,
        lambda work: thread.post(lambda: work(program)),  # type: ignore[arg-type]
    )
    drafter = DraftModel(vocab_size)
    drafter._step_s = 10.0  # only a test that hangs waits as long
    drafter.connect(asks, context_tokens=LIMITS.context_tokens, vocab_size=VOCAB, ahead=ahead)
    try:
        yield drafter, program, answers
    finally:
        program.may_go_on.set()
        drafter.close()
        server.close()
        thread.close()


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def ask(drafter: DraftModel, tokens: Sequence[int], most: int = 3) -> list[int]:
    return list(drafter.propose("r", tokens, len(tokens), most))


def test_guesses_are_what_the_draft_model_says() -> None:
    with served() as (drafter, program, _link):
        tokens = [5, 6, 7]
        assert ask(drafter, tokens) == continued(tokens, 3)
        tokens += [*continued(tokens, 2), 99]
        assert ask(drafter, tokens) == continued(tokens, 3), "the third was wrong"
        assert program.known[: len(tokens)] == tokens
        assert program.computed == 3 + 2 + 1 + 2, "right guesses are not computed again"


def test_it_drafts_on_while_nothing_is_asked() -> None:
    with served(ahead=True) as (drafter, program, _link):
        tokens = [5, 6, 7]
        guesses = ask(drafter, tokens)
        until(lambda: program.computed == 3 + 6)
        tokens += continued(tokens, 4)
        program.may_go_on.clear()
        assert ask(drafter, tokens) == continued(tokens, 3), "they were known already"
        assert guesses == tokens[3:6]
        program.may_go_on.set()
    with served() as (drafter, program, _link):
        ask(drafter, [5, 6, 7])
        time.sleep(0.05)
        assert program.computed == 3 + 2


def test_there_are_no_guesses_while_a_prompt_is_computed() -> None:
    with served() as (drafter, program, _link):
        prompt = list(range(60))
        assert ask(drafter, prompt) == []
        until(lambda: len(program.known) >= 60)
        assert ask(drafter, prompt) == continued(prompt, 3)
        steps = [step.num_tokens for step in program.steps]
        assert steps[:8] == [8, 8, 8, 8, 8, 8, 8, 4]


def test_a_prompt_is_computed_while_its_answer_is_not_yet_asked_for() -> None:
    prompt = list(range(60))
    with served(ahead=True) as (drafter, program, _link):
        drafter.foresee("r", prompt[:20])
        drafter.foresee("r", prompt)
        until(lambda: len(program.known) == 60)
        until(lambda: drafter._answered == 2)
        steps = len(program.steps)
        prompt.append(5)
        assert ask(drafter, prompt) == continued(prompt, 3)
        assert program.steps[steps].num_tokens == 1
    with served() as (drafter, program, _link):
        drafter.foresee("r", prompt)
        assert drafter._asked == 0, "it would take the processor from its large model"


def test_fewer_tokens_and_no_new_ones() -> None:
    asks, answers = link_ends("memory")
    program, thread = MadeUp(), ComputeThread("drafts", at_end=lambda: None)
    server = DraftServer(answers, LIMITS, VOCAB, lambda work: thread.post(lambda: work(program)))  # type: ignore[arg-type]

    def told(kept: int, *tokens: int) -> list[int]:
        send_question(asks, DraftQuestion(kept=kept, tokens=tokens, most=2, ahead=1))
        return receive_answer(asks, most=2, vocab_size=VOCAB)

    assert told(0, 5, 6, 7) == continued([5, 6, 7], 2)
    assert told(3) == continued([5, 6, 7], 2)
    assert told(2) == continued([5, 6], 2)
    assert told(2, 8) == continued([5, 6, 8], 2)
    assert told(0, 4) == continued([4], 2)
    server.close()
    thread.close()


def test_another_request_begins_anew() -> None:
    with served() as (drafter, _program, _link):
        ask(drafter, [5, 6, 7])
        assert list(drafter.propose("s", [5, 6], 2, 2)) == continued([5, 6], 2)
        drafter.forget("r")
        drafter.forget("s")
        assert list(drafter.propose("s", [4], 1, 1)) == continued([4], 1)


def test_the_context_of_the_draft_model_may_be_shorter() -> None:
    with served() as (drafter, program, _link):
        tokens = list(range(LIMITS.context_tokens - 8))
        ask(drafter, tokens)
        until(lambda: len(program.known) >= len(tokens))
        tokens += range(6)
        assert ask(drafter, tokens, 5) == continued(tokens, 2)
        tokens += range(4)
        assert ask(drafter, tokens) == []


def test_a_token_that_the_draft_model_lacks_ends_its_guesses() -> None:
    with served(vocab_size=VOCAB + 9) as (drafter, _program, _link):
        assert ask(drafter, [5, VOCAB + 2]) == []
        assert ask(drafter, [5, VOCAB + 2, 7]) == []
        assert list(drafter.propose("s", [5], 1, 1)) == continued([5], 1)


def test_a_late_answer_is_no_guess_and_the_next_steps_do_not_wait() -> None:
    with served() as (drafter, program, _link):
        drafter._step_s = 0.01
        program.may_go_on.clear()
        assert ask(drafter, [5, 6, 7]) == []
        drafter._step_s = 1000.0
        assert ask(drafter, [5, 6, 7, 8]) == [], "it does not wait"
        program.may_go_on.set()
        drafter._step_s = 10.0
        tokens = [5, 6, 7, 8, 9]
        assert ask(drafter, tokens) == continued(tokens, 3)


@pytest.mark.parametrize("how", ["closed", "too many", "no token", "negative"])
def test_a_draft_model_that_is_lost_or_lies_guesses_nothing_more(how: str) -> None:
    asks, answers = link_ends("memory")
    drafter = DraftModel(VOCAB)
    drafter._step_s = 10.0

    def answer() -> None:
        if how == "closed":
            answers.close()
            return
        told = np.zeros(1 + MOST_DRAFTED, np.int64)
        told[:3] = {"too many": (9, 1, 1), "no token": (1, VOCAB, 0), "negative": (-1, 0, 0)}[how]
        answers.receive(np.empty(4, np.int64))
        answers.receive(np.empty(3, np.int64))
        answers.send(told)

    other = threading.Thread(target=answer)
    drafter.connect(asks, context_tokens=96, vocab_size=VOCAB, ahead=True)
    other.start()
    assert ask(drafter, [5, 6, 7]) == []
    other.join()
    until(lambda: drafter._link is None)
    assert ask(drafter, [5, 6, 7, 8]) == []
    with served() as (again, _program, _link):
        assert ask(again, [5]) == continued([5], 3)


@pytest.mark.parametrize(
    "question",
    [
        {"kept": 1, "tokens": [1]},
        {"kept": 0, "tokens": [VOCAB]},
        {"kept": 0, "tokens": [-1]},
        {"kept": 0, "tokens": []},
        {"kept": -1, "tokens": [1, 2]},
        {"kept": 0, "tokens": [1] * (LIMITS.context_tokens + 1)},
        {"kept": 0, "tokens": [1], "most": MOST_DRAFTED + 1},
        {"kept": 0, "tokens": [1], "most": 0},
        {"kept": 0, "tokens": [1], "ahead": 1 << 40},
    ],
)
def test_a_question_that_makes_no_sense_ends_the_link(question: dict[str, Any]) -> None:
    program = MadeUp()
    asks, answers = link_ends("memory")
    thread = ComputeThread("drafts", at_end=lambda: None)
    server = DraftServer(answers, LIMITS, VOCAB, lambda work: thread.post(lambda: work(program)))  # type: ignore[arg-type]
    with contextlib.suppress(PeerLostError):
        send_question(asks, DraftQuestion(**{"most": 1, "ahead": 0, **question}))
    with pytest.raises(PeerLostError):
        receive_answer(asks, most=MOST_DRAFTED, vocab_size=VOCAB)
    assert not program.steps
    server.close()
    thread.close()


def test_messages_arrive_as_they_were_sent() -> None:
    asks, answers = link_ends("memory")
    for guesses in ([], [3], list(range(MOST_DRAFTED))):
        send_answer(answers, guesses)
        assert receive_answer(asks, most=MOST_DRAFTED, vocab_size=VOCAB) == guesses


def test_a_request_without_a_draft_model_is_computed_in_pairs() -> None:
    """Its last bits do not depend on whether one is there."""
    speculator = Speculator({"lookup": SuffixLookup(), "draft": DraftModel(VOCAB)})
    for end in range(4, 9):
        draft = speculator.draft("r", list(range(end)), terms("draft", 3), most=MOST_DRAFTED)
        assert draft == (end - 1,)
        speculator.verified("r", 1, 0)


def test_guesses_that_take_long_are_fewer() -> None:
    seconds = timed({1: 1.0, 2: 1.01, 16: 1.1})
    assert draft_length(0.9, seconds.of, MOST_DRAFTED) == MOST_DRAFTED
    assert draft_length(0.9, seconds.of, MOST_DRAFTED, guess_s=0.3) < 7
    assert draft_length(0.9, seconds.of, MOST_DRAFTED, guess_s=9.0) == 1
