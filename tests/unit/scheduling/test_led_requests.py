"""Steps of requests whose tokens a grammar leads, with guesses at what it forces."""

from __future__ import annotations

from typing import Any

import pytest

from edge.protocol.step import Speculation
from edge.scheduling.events import Guessed
from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps


def begun(*, drafts: int = 7, memory: int = 100, cut_end: Any = None, **terms: Any) -> Steps:
    """A request with two tokens of a prompt, and one of its answer."""
    steps = Steps(
        Residency(memory_tokens=memory, requests=4),
        stages=1,
        chunk_tokens=8,
        logit_chunk_tokens=8,
        drafts=drafts,
        memory_tokens=memory,
        cut_end=cut_end,
    )
    steps.add("a", [1, 2], **{"new_tokens": 40, "is_led": True, "speculate": "auto", **terms})
    assert shown(steps) == ((1, 2), 1, 1, 0), "the first token is not guessed"
    steps.answer([3])
    return steps


def shown(steps: Steps) -> tuple[tuple[int, ...], int, int, int]:
    """The next step's tokens, rows that want a token, and the most tokens that it gives; whether
    it verifies a draft."""
    step = steps.decide().step
    assert step is not None
    (entry,) = step.entries
    return entry.tokens, entry.logit_rows, step.run, int(step.drafted > 0)


@pytest.mark.parametrize(
    ("guesses", "was_guessed", "expected"),
    [
        ((4, 5, 6), False, ((3, 4, 5, 6), 4, 4, 1)),
        ((4, 5), False, ((3, 4, 5, 3), 4, 3, 1)),
        ((4, 5), True, ((3, 4, 5, 3), 4, 3, 1)),
        ((), True, ((3, 3), 2, 1, 1)),
        ((), False, ((3,), 1, 1, 0)),
        (tuple(range(4, 14)), False, ((3, *range(4, 11)), 8, 8, 1)),
    ],
)
def test_guesses_make_an_even_number_of_rows(
    guesses: tuple[int, ...], was_guessed: bool, expected: object
) -> None:
    """A row alone is one without guesses whose token was not guessed."""
    steps = begun()
    steps.tell(Guessed(request="a", tokens=guesses, was_guessed=was_guessed))
    assert shown(steps) == expected


def test_a_step_has_no_more_guesses_than_can_be_cut_off() -> None:
    steps = begun(cut_end={2: 7}.__getitem__)
    steps.tell(Guessed(request="a", tokens=tuple(range(4, 14)), was_guessed=False))
    assert shown(steps) == ((3, 4, 5, 6), 4, 4, 1), "an even number of five rows"


def test_each_step_has_guesses_of_its_own() -> None:
    steps = begun()
    steps.tell(Guessed(request="a", tokens=(4, 5, 6), was_guessed=False))
    assert shown(steps)[0] == (3, 4, 5, 6)
    steps.answer([4, 9], drafted=3)
    assert shown(steps) == ((9,), 1, 1, 0)
    assert (steps.work.drafted_tokens, steps.work.accepted_tokens) == (3, 1)
    assert steps.state.active["a"].together == ((2, 4),)


@pytest.mark.parametrize(("drafts", "speculate"), [(0, "auto"), (7, "off")])
def test_where_nothing_is_guessed(drafts: int, speculate: Speculation) -> None:
    steps = begun(drafts=drafts, speculate=speculate)
    steps.tell(Guessed(request="a", tokens=(4, 5, 6), was_guessed=True))
    assert shown(steps) == ((3,), 1, 1, 0)


def test_no_more_is_guessed_than_there_is_room_for() -> None:
    steps = begun(new_tokens=4)
    steps.tell(Guessed(request="a", tokens=(4, 5, 6, 7, 8), was_guessed=False))
    assert shown(steps) == ((3, 4, 5, 3), 4, 3, 1)


def test_a_led_answer_has_guesses_beside_a_prompt_and_none_beside_an_answer() -> None:
    steps = begun()
    steps.add("b", [7, 8], new_tokens=9, speculate="auto")
    steps.tell(Guessed(request="gone", tokens=(4,), was_guessed=False))
    steps.tell(Guessed(request="a", tokens=(4, 5, 6), was_guessed=False))
    assert shown(steps) == ((3, 4, 5, 6), 4, 4, 1)
    steps.answer([4, 10], drafted=3)
    assert shown(steps) == ((7, 8), 1, 1, 0)
    steps.answer([9])
    steps.tell(Guessed(request="a", tokens=(4, 5, 6), was_guessed=False))
    step = steps.decide().step
    assert step is not None
    assert {entry.tokens for entry in step.entries} == {(10,), (9,)}
