"""The model that ships answers what it was taught, in one piece and cut into several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.demos.world import COMPLETIONS, QUESTIONS, is_right
from tests.support.plans import bundled_plan
from tests.support.slow_cases import shown_in_parts

LEAST_RIGHT = 0.9
"""Rounding to int4 may cost an answer here and there; a wrong kernel or slice costs most."""

SOME_QUESTIONS = QUESTIONS[::3]
"""Of each kind."""

MOST_TOKENS = 40
"""The longest expected answer has 30."""

AT_ONCE = 8
"""A step of eight answers takes hardly longer than one of one."""


def wrong_answers(
    model: edge.Model, questions: Sequence[tuple[str, str]], *, as_chat: bool
) -> list[str]:
    """ "question -> answer" of each that does not start as expected."""
    prompts: list[str] | list[list[int]] = [question for question, _expected in questions]
    if as_chat:
        prompts = [
            model.tokenizer.encode_chat([{"role": "user", "content": question}])
            for question, _expected in questions
        ]
    replies = model.generate(prompts, max_new_tokens=MOST_TOKENS)
    return [
        f"{question} -> {reply.text}"
        for (question, expected), reply in zip(questions, replies, strict=True)
        if not is_right(reply.text, expected)
    ]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("solo", marks=shown_in_parts("e2e/test_exactness_quantized.py")),
        "tensor_3",
    ],
)
def test_questions_as_chat_turns(five_peers: edge.Cluster, layout: str) -> None:
    with five_peers.load(
        MODEL, dtype="int4", plan=bundled_plan(layout), concurrency=AT_ONCE
    ) as model:
        wrong = wrong_answers(model, SOME_QUESTIONS, as_chat=True)
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(SOME_QUESTIONS), wrong


@pytest.mark.parametrize(
    "questions", [SOME_QUESTIONS, COMPLETIONS], ids=["questions", "completions"]
)
def test_plain_text(five_peers: edge.Cluster, questions: Sequence[tuple[str, str]]) -> None:
    with five_peers.load(
        MODEL, dtype="int4", plan=bundled_plan("pipeline_3"), concurrency=AT_ONCE
    ) as model:
        wrong = wrong_answers(model, questions, as_chat=False)
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(questions), wrong
