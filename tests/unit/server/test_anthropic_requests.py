"""What Anthropic's clients send, made into a question: each of its fields has its say."""

from __future__ import annotations

from typing import Any

import pytest

from edge.server.anthropic_messages import question_of
from edge.server.fields import Fields

ASKED: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
FORM = {"type": "json_schema", "schema": {"const": 7}}
OTHER = {"type": "json_schema", "schema": {"const": 8}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"output_format": FORM}, {"const": 7}),
        ({"output_config": {"format": FORM}}, {"const": 7}),
        ({"output_config": {"effort": "low"}, "output_format": FORM}, {"const": 7}),
        ({"output_config": {"format": FORM}, "output_format": OTHER}, {"const": 7}),
        ({"output_config": {"effort": "low"}}, None),
    ],
)
def test_the_form_of_an_answer_is_read_wherever_it_stands(
    body: dict[str, Any], wanted: object
) -> None:
    assert question_of(Fields({**ASKED, **body})).options.json_schema == wanted
