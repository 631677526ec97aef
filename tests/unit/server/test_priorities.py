"""How urgent a request is: its own word, or OpenAI's for a tier of service."""

from __future__ import annotations

from typing import Any

import pytest

import edge
from edge.errors import RequestError
from edge.server import anthropic_messages, embeddings, ollama, openai_fields, openai_responses
from edge.server.fields import Fields

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("said", "priority"),
    [
        ({}, "normal"),
        ({"service_tier": "auto"}, "normal"),
        ({"service_tier": "flex"}, "low"),
        ({"service_tier": "priority"}, "high"),
        ({"service_tier": "priority", "priority": "low"}, "low"),
        ({"priority": "high"}, "high"),
    ],
)
def test_openai(said: dict[str, Any], priority: str) -> None:
    for options in (
        openai_fields.chat_question(Fields({"messages": [HELLO], **said})).options,
        openai_fields.completion_question(Fields({"prompt": "a", **said})).options,
        openai_responses.question_of(Fields({"input": "a", **said})).options,
        embeddings.openai_asked(Fields({"input": "a", **said})),
    ):
        assert options.priority == priority


def test_others_have_a_field_for_it() -> None:
    """What Anthropic calls a tier says which capacity is paid for."""
    chat = {"messages": [HELLO], "max_tokens": 1, "service_tier": "standard_only"}
    assert anthropic_messages.question_of(Fields(chat)).options.priority == "normal"
    low = {"priority": "low"}
    for options in (
        anthropic_messages.question_of(Fields({**chat, **low})).options,
        ollama.chat_question(Fields({"messages": [HELLO], **low})).options,
        ollama.generate_question(Fields({"prompt": "a", **low})).options,
        embeddings.ollama_asked(Fields({"input": "a", **low})),
        embeddings.ollama_prompt(Fields({"prompt": "a", **low})),
    ):
        assert options.priority == "low"


def test_what_is_no_priority_is_refused() -> None:
    with pytest.raises(RequestError, match="'high', 'normal' or 'low', not 'urgent'"):
        edge.GenerationOptions(priority="urgent")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not 7"):
        edge.GenerationOptions(priority=7)  # type: ignore[arg-type]
