"""How much a model is to think: what clients of each dialect say is what templates read."""

from __future__ import annotations

from typing import Any

import pytest

from edge.server import anthropic_messages, ollama, openai_fields, openai_responses
from edge.server.fields import Fields

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("ask", "body", "wanted"),
    [
        (openai_fields.chat_question, HELLO, {}),
        (
            openai_fields.chat_question,
            {**HELLO, "reasoning_effort": "minimal"},
            {**ON, "reasoning_effort": "low"},
        ),
        (openai_fields.chat_question, {**HELLO, "reasoning_effort": "none"}, OFF),
        (
            openai_fields.chat_question,
            {
                **HELLO,
                "reasoning_effort": "high",
                "chat_template_kwargs": {"enable_thinking": False},
            },
            {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"},
        ),
        (openai_fields.chat_question, {**HELLO, "enable_thinking": False}, OFF),
        (openai_fields.chat_question, {**HELLO, "enable_thinking": True}, ON),
        (
            openai_fields.chat_question,
            {**HELLO, "enable_thinking": True, "reasoning_effort": "none"},
            ON,
        ),
        (openai_fields.chat_question, {**HELLO, "thinking": {"type": "disabled"}}, OFF),
        (openai_fields.chat_question, {**HELLO, "thinking": {"type": "auto"}}, {}),
        (
            openai_fields.chat_question,
            {**HELLO, "reasoning": {"effort": "low", "exclude": True}},
            {**ON, "reasoning_effort": "low"},
        ),
        (openai_fields.chat_question, {**HELLO, "reasoning": {"enabled": False}}, OFF),
        (anthropic_messages.question_of, {**HELLO, "max_tokens": 1}, OFF),
        (
            anthropic_messages.question_of,
            {**HELLO, "max_tokens": 1, "output_config": {"effort": "low"}},
            {**ON, "reasoning_effort": "low"},
        ),
        (
            openai_responses.question_of,
            {"input": "Hello", "reasoning": {"effort": "medium", "summary": "auto"}},
            {**ON, "reasoning_effort": "medium"},
        ),
        (openai_responses.question_of, {"input": "Hello", "reasoning": {}}, {}),
        (
            anthropic_messages.question_of,
            {**HELLO, "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            ON,
        ),
        (
            anthropic_messages.question_of,
            {
                **HELLO,
                "max_tokens": 1,
                "thinking": {"type": "disabled"},
                "output_config": {"effort": "max"},
            },
            {**OFF, "reasoning_effort": "high"},
        ),
        (ollama.chat_question, {**HELLO, "think": False}, OFF),
        (ollama.chat_question, {**HELLO, "think": "low"}, {**ON, "reasoning_effort": "low"}),
        (ollama.generate_question, {"prompt": "Hello", "think": True}, ON),
    ],
)
def test_templates_are_told(ask: Any, body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert ask(Fields(body)).variables == wanted
