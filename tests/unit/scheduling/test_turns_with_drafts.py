"""Answers in turn, each with a draft, where that is faster than one step of all."""

from __future__ import annotations

from typing import Any

import pytest

from edge.protocol.step import NO_GUESSES, Guesses, Step
from edge.scheduling.residency import Residency
from tests.support.scheduling import Steps

Shown = dict[str, tuple[int, ...]]


def begun(**limits: Any) -> Steps:
    return Steps(
        Residency(memory_tokens=200, requests=4),
        chunk_tokens=4,
        logit_chunk_tokens=4,
        drafts=7,
        memory_tokens=200,
        **{"stages": 1, **limits},
    )


def together(
    *guesses: Guesses, new_tokens: int = 30, of_b: int | None = None, **limits: Any
) -> Steps:
    """Two answers after a step together that gave 50 and 51, with these guesses behind it.

    new_tokens: of each answer; of_b: of the second, if it has others.
    """
    steps = begun(**limits)
    steps.add("a", [1, 2], new_tokens=new_tokens, speculate="auto")
    assert shown(steps) == {"a": (1, 2)}
    steps.add("b", [1, 2], new_tokens=of_b or new_tokens, speculate="auto")
    if limits:
        assert shown(steps) == {"b": (1, 2)}
        steps.answer([40])
        steps.answer([40])
    else:
        steps.answer([40])
        assert shown(steps) == {"a": (40,)}
        steps.answer([40])
        assert shown(steps) == {"b": (1, 2)}
        steps.answer([40])
    assert shown(steps) == {"a": (40,), "b": (40,)}
    steps.answer([50, 51], guesses=guesses)
    return steps


def decided(steps: Steps) -> Step:
    step = steps.decide().step
    assert step is not None
    return step


def shown(steps: Steps) -> Shown:
    return {entry.request: entry.tokens for entry in decided(steps).entries}


def of(*tokens: int, in_turn: int) -> Guesses:
    return Guesses(tokens=tokens, in_turn=in_turn)


def test_each_has_a_draft_in_its_turn() -> None:
    """The next one waits at the device, which so has no pause."""
    steps = together(of(60, 61, 62, in_turn=2), of(70, in_turn=3))
    step = decided(steps)
    assert [entry.tokens for entry in step.entries] == [(50, 60, 61, 62)]
    assert (step.run, step.drafted, step.ends_at_once) == (4, 3, True)
    assert shown(steps) == {"b": (51, 70)}
    assert steps.decide().step is None
    steps.answer([60, 61, 99], drafted=3, guesses=[of(60, in_turn=2)])
    assert shown(steps) == {"a": (99, 60)}
    steps.answer([70, 71], drafted=1, guesses=[of(80, 81, in_turn=2)])
    step = decided(steps)
    assert [entry.tokens for entry in step.entries] == [(71, 80, 81, 71)], "an even number of rows"
    assert step.run == 3
    steps.answer([60, 63], drafted=1)
    assert steps.decide().step is None, "without guesses it waits for the other"
    steps.answer([80, 82], drafted=2, guesses=[of(83, in_turn=2)])
    assert shown(steps) == {"a": (63,), "b": (82,)}


def test_no_more_is_guessed_than_there_is_room_for() -> None:
    steps = together(of(60, 61, 62, in_turn=2), of(70, 71, in_turn=2), new_tokens=4)
    assert shown(steps) == {"a": (50,), "b": (51,)}, "the first has one token left"
    steps = together(of(60, 61, 62, in_turn=2), of(70, 71, in_turn=2), new_tokens=5)
    step = decided(steps)
    assert [entry.tokens for entry in step.entries] == [(50, 60)]
    assert step.run == 2


def test_an_answer_at_its_last_token_does_not_wait_for_the_turns_of_others() -> None:
    steps = together(of(60, 61, in_turn=1), NO_GUESSES, new_tokens=30, of_b=3)
    assert shown(steps) == {"a": (50,), "b": (51,)}


def test_with_states_stages_do_not_overlap() -> None:
    steps = together(of(60, in_turn=1), of(70, in_turn=1), stages=2, rewinds=True)
    assert shown(steps) == {"a": (50,), "b": (51,)}
    steps.answer([60, 70], guesses=[of(61, in_turn=2), of(71, in_turn=2)])
    assert shown(steps) == {"a": (60, 61)}


@pytest.mark.parametrize("other", [NO_GUESSES, of(70, in_turn=1)])
def test_all_share_a_step_unless_each_gains(other: Guesses) -> None:
    """It runs on, until its sampler finds that they would be faster in turn."""
    steps = together(of(60, 61, in_turn=2), other)
    step = decided(steps)
    assert [entry.tokens for entry in step.entries] == [(50,), (51,)]
    assert (step.drafts, step.drafted, step.ends_at_once) == (7, 0, False)
    steps.answer([60, 70], last=False)
    steps.answer([61, 71], guesses=[of(62, in_turn=2), of(72, in_turn=2)])
    assert shown(steps) == {"a": (61, 62)}


def test_answers_with_a_stage_each_keep_no_other_waiting() -> None:
    steps = together(of(60, 61, 62, in_turn=1), of(70, in_turn=1), stages=2)
    assert shown(steps) == {"a": (50, 60, 61, 62)}
    assert shown(steps) == {"b": (51, 70)}
    steps.answer([60, 61, 62, 63], drafted=3)
    assert shown(steps) == {"a": (63,)}, "without guesses"
    steps.answer([70, 71], drafted=1, guesses=[of(72, in_turn=1)])
    assert shown(steps) == {"b": (71, 72)}


def test_answers_share_steps_while_prompts_are_read() -> None:
    steps = together(of(60, in_turn=2), of(70, in_turn=2))
    steps.add("c", [3] * 9, new_tokens=5)
    seen = []
    for _number in range(2):
        seen.append(shown(steps))
        steps.answer([52, 53] if "a" in seen[-1] else [])
    assert {"c": (3,) * 4} in seen
    assert {"a": (50,), "b": (51,)} in seen


def test_an_answer_alone_has_drafts_beside_a_prompt() -> None:
    steps = begun()
    steps.add("a", [1, 2], new_tokens=30, speculate="auto")
    assert shown(steps) == {"a": (1, 2)}
    steps.answer([50], guesses=[of(60, 61, 62, in_turn=1)])
    steps.add("c", [3] * 9, new_tokens=5)
    assert shown(steps) == {"a": (50, 60, 61, 62)}
    assert not steps.decide().yields, "that step ends anyway"


def test_a_run_begins_with_the_guesses_that_are_known() -> None:
    steps = begun()
    steps.add("a", [1, 2], new_tokens=30, speculate="auto")
    assert shown(steps) == {"a": (1, 2)}
    steps.answer([50], guesses=[of(60, 61, in_turn=0)])
    step = decided(steps)
    assert [entry.tokens for entry in step.entries] == [(50, 60, 61, 50)]
    assert not step.ends_at_once
