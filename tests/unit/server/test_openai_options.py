"""Options that OpenAI's dialects have beside OpenAI's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edge.server import openai_fields, openai_responses
from edge.server.fields import Fields
from edge.server.refusals import Refusal

READERS: dict[str, tuple[Callable[[Fields], Any], dict[str, Any]]] = {
    "chat": (openai_fields.chat_question, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (openai_fields.completion_question, {"prompt": "a"}),
    "responses": (openai_responses.question_of, {"input": "a"}),
}


@pytest.mark.parametrize("dialect", READERS)
def test_fewest_tokens(dialect: str) -> None:
    read, body = READERS[dialect]
    assert read(Fields(body)).options.min_tokens is None
    assert read(Fields({**body, "min_tokens": 3})).options.min_tokens == 3
    with pytest.raises(Refusal, match="min_tokens"):
        read(Fields({**body, "min_tokens": -1}))
