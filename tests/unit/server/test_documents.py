"""Clients begin with documents that the server offers, in every dialect of conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edge.server import anthropic_messages, ollama, openai_fields, openai_responses
from edge.server.fields import Fields
from edge.server.refusals import Refusal
from tests.support.scripted_models import ScriptedModel, Visit, word

HELLO = {"role": "user", "content": "Hello"}
OFFERED = {"handbook": "one three", "law": "seven"}


async def asked(path: str, body: dict[str, Any]) -> tuple[ScriptedModel, int | None, Any]:
    model = ScriptedModel()
    model.says.put_nowait(word("Yes", ends=True))
    visit = Visit(model, path, {"stream": False, **body}, documents=OFFERED)
    await visit.running
    return model, visit.status, json.loads(visit.text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_conversation_begins_with_documents(path: str) -> None:
    async def main() -> None:
        body = {"messages": [HELLO], "max_tokens": 9, "context": ["law", "handbook"]}
        model, status, _ = await asked(path, body)
        assert status == 200
        assert model.prompts == [model.encode("seven one three Hello")]
        _, status, told = await asked(path, {**body, "context": ["secret"]})
        assert status == 400
        assert "no document 'secret' is served" in json.dumps(told)
        _, status, told = await asked(path, {**body, "context": ["law", "law"]})
        assert status == 400
        assert "twice" in json.dumps(told)

    asyncio.run(main())


def test_a_plain_prompt_begins_with_none() -> None:
    async def main() -> None:
        _, status, told = await asked("/v1/completions", {"prompt": "a", "context": ["law"]})
        assert status == 400
        assert "context begins a conversation" in json.dumps(told)

    asyncio.run(main())


def test_every_interface_has_the_field() -> None:
    chat: dict[str, Any] = {"messages": [HELLO], "context": ["law"]}
    for question in (
        openai_fields.chat_question(Fields(chat)),
        openai_responses.question_of(Fields({"input": "a", "context": ["law"]})),
        anthropic_messages.question_of(Fields({**chat, "max_tokens": 1})),
        ollama.chat_question(Fields(chat)),
    ):
        assert question.options.context == ["law"]
    with pytest.raises(Refusal):
        openai_fields.chat_question(Fields({**chat, "context": [7]}))
