"""What cannot be ranked is refused with the field or the model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.scripted_models import ScriptedModel, Visit

PLAIN: dict[str, Any] = {"query": "q", "documents": ["a", "b"]}


class Chatting(ScriptedModel):
    can_chat = True


async def told(model: ScriptedModel, body: dict[str, Any]) -> tuple[int | None, str]:
    visit = Visit(model, "/v1/rerank", body)
    await visit.running
    return visit.status, json.loads(visit.text)["error"]["message"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"query": ""}, "query must be a text, 1 or more characters"),
        ({"query": None}, "query is missing"),
        ({"documents": []}, "documents must be a list, 1 to 2048 items"),
        ({"documents": ["a", ""]}, "documents[1] must be"),
        ({"documents": ["a", {"text": ""}]}, "documents[1] must be a text, or an object with"),
        ({"documents": ["a", {"image": "x"}]}, "documents[1] must be a text, or an object with"),
        ({"documents": ["a"] * 2049}, "documents must be a list, 1 to 2048 items"),
        ({"top_n": 0}, "top_n must be a whole number, 1 or more"),
    ],
)
def test_what_is_no_request(change: dict[str, Any], sentence: str) -> None:
    body = {name: each for name, each in {**PLAIN, **change}.items() if each is not None}
    status, message = asyncio.run(told(Chatting(), body))
    assert status == 400
    assert message.startswith(sentence), message


def test_models_that_rank_nothing() -> None:
    model = ScriptedModel()
    model.can_chat = False  # type: ignore[attr-defined]
    assert asyncio.run(told(model, PLAIN)) == (
        400,
        "reranking needs a generative model with a chat template, such as Qwen3-Reranker; "
        "cross-encoders are not read",
    )
    assert "no tokens for yes and no" in asyncio.run(told(Chatting(), PLAIN))[1]
