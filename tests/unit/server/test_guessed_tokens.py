"""Whether tokens are guessed is a field of every interface, and guesses are counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from edge.scheduling.orders import Work
from edge.server import anthropic_messages, ollama, openai_fields, openai_responses
from edge.server.fields import Fields
from edge.server.metrics import Metrics
from edge.server.refusals import Refusal

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("said", [{}, {"speculate": "off"}, {"speculate": "mtp"}])
def test_every_interface(said: dict[str, Any]) -> None:
    chat = {"messages": [HELLO], **said}
    for question in (
        openai_fields.chat_question(Fields(chat)),
        openai_fields.completion_question(Fields({"prompt": "a", **said})),
        openai_responses.question_of(Fields({"input": "a", **said})),
        anthropic_messages.question_of(Fields({**chat, "max_tokens": 1})),
        ollama.chat_question(Fields(chat)),
        ollama.generate_question(Fields({"prompt": "a", **said})),
    ):
        assert question.options.speculate == said.get("speculate")


def test_another_way_is_refused() -> None:
    with pytest.raises(Refusal, match="one of auto, draft, lookup, mtp, off"):
        openai_fields.chat_question(Fields({"messages": [HELLO], "speculate": "elsewhere"}))


def test_guesses_are_counted() -> None:
    metrics = Metrics()
    metrics.note_work("m", Work(steps=2, drafted_tokens=5, accepted_tokens=1))
    metrics.note_work("m", Work(steps=5, drafted_tokens=9, accepted_tokens=4))
    metrics.note_work("m", Work(steps=1, drafted_tokens=3, accepted_tokens=3))  # loaded anew
    text = metrics.text().decode()
    found = re.findall(r'^edge_(\w+)_tokens_total\{model="m"\} (\S+)$', text, re.MULTILINE)
    assert ("drafted", "12.0") in found
    assert ("accepted", "7.0") in found
