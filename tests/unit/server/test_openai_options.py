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


@pytest.mark.parametrize(
    ("name", "value", "neutral", "said"),
    [
        ("bad_words", ["x"], [], "give logit_bias"),
        ("n_predict", 5, -1, "give max_tokens"),
        ("min_new_tokens", 5, 0, "give min_tokens"),
        ("think", False, None, "give reasoning_effort"),
        ("include_stop_str_in_output", True, False, "leave it out"),
        ("skip_special_tokens", False, True, "leave it out"),
        ("add_generation_prompt", False, True, "leave it out"),
        ("use_beam_search", True, False, "leave it out"),
        ("length_penalty", 2.0, 1.0, "leave it out"),
        ("typical_p", 0.5, 1.0, "leave it out"),
        ("mirostat", 2, 0, "leave it out"),
        ("dry_multiplier", 0.8, 0.0, "leave it out"),
        ("xtc_probability", 0.5, 0, "leave it out"),
        ("truncate_prompt_tokens", 5, None, "leave it out"),
        ("chat_template", "x", None, "leave it out"),
        ("json_schema", {"type": "object"}, None, "give response_format"),
    ],
)
@pytest.mark.parametrize("dialect", READERS)
def test_fields_of_other_servers_are_refused_where_they_change_the_answer(
    dialect: str, name: str, value: object, neutral: object, said: str
) -> None:
    read, body = READERS[dialect]
    read(Fields({**body, name: neutral}))
    with pytest.raises(Refusal, match=f"{name} is not supported by this server; {said}"):
        read(Fields({**body, name: value}))


@pytest.mark.parametrize("dialect", READERS)
def test_other_names_that_are_read(dialect: str) -> None:
    read, body = READERS[dialect]
    found = read(
        Fields({**body, "repeat_penalty": 1.3, "ignore_eos": True, "stop_token_ids": [5, 9]})
    ).options
    assert found.repetition_penalty == 1.3
    assert found.ignore_eos
    assert list(found.stop_token_ids) == [5, 9]
    both = read(Fields({**body, "repeat_penalty": 1.3, "repetition_penalty": 1.1})).options
    assert both.repetition_penalty == 1.1


@pytest.mark.parametrize("dialect", READERS)
def test_a_schema_beside_json_object_is_kept_to(dialect: str) -> None:
    read, body = READERS[dialect]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_object", "schema": schema}
    said = {"text": {"format": form}} if dialect == "responses" else {"response_format": form}
    assert read(Fields({**body, **said})).options.json_schema == schema
