"""A body that is not as its type says is refused with the place, the kind and the range."""

from __future__ import annotations

from typing import Any

import pytest

from edge.kernels.sampling.parameters import SamplingParameters
from edge.server import bodies
from edge.server.bodies import plain_schema
from edge.server.fields import Fields
from edge.server.openai_fields import chat_question, completion_question
from edge.server.openai_responses import question_of
from edge.server.refusals import Refusal

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("change", "place", "sentence"),
    [
        ({"temperature": 3}, "temperature", "must be a number, 0 to 2"),
        ({"temperature": float("nan")}, "temperature", "must be a number, 0 to 2"),
        ({"temperature": True}, "temperature", "must be a number, 0 to 2"),
        ({"n": 0}, "n", "must be a whole number, 1 to 16"),
        ({"n": 1.5}, "n", "must be a whole number, 1 to 16"),
        ({"max_tokens": 1 << 70}, "max_tokens", "must be a whole number, 1 or more"),
        ({"stop": ["x", ""]}, "stop[1]", "must be a text, 1 or more characters"),
        (
            {"stop": ["x"] * 17},
            "stop",
            "must be a text, 1 or more characters or a list, 0 to 16 items",
        ),
        ({"messages": None}, "messages", "must be a list, 1 or more items"),
        ({"messages": [HELLO, 7]}, "messages[1]", "must be an object"),
        ({"messages": [{}]}, "messages[0].role", "is missing"),
        (
            {"messages": [{"role": "robot"}]},
            "messages[0].role",
            "must be one of assistant, developer, system, tool, user, not 'robot'",
        ),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "must be a number, -100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "has a name that is not the id of a token"),
    ],
    ids=repr,
)
def test_a_refusal_says_what_is_wrong(change: dict[str, Any], place: str, sentence: str) -> None:
    with pytest.raises(Refusal) as refused:
        Fields({"messages": [HELLO], **change}).shaped(bodies.Chat)
    assert (refused.value.status, refused.value.param) == (400, place)
    assert refused.value.message.startswith(f"{place} ")
    assert refused.value.message.endswith(sentence)


@pytest.mark.parametrize(
    ("ask", "body", "names"),
    [
        (chat_question, {"messages": [HELLO]}, ("max_tokens", "max_completion_tokens")),
        (completion_question, {"prompt": "a"}, ("max_tokens",)),
        (question_of, {"input": "a"}, ("max_output_tokens",)),
    ],
)
def test_limits_as_other_servers_have_them(
    ask: Any, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    """-1 is no limit, and a whole number may be written with a point."""
    for name in names:
        assert ask(Fields({**body, name: -1})).options.max_new_tokens is None
        assert ask(Fields({**body, name: 20.0})).options.max_new_tokens == 20
        for wrong in (-2, 0, 20.5, -1.5):
            with pytest.raises(Refusal, match=name):
                ask(Fields({**body, name: wrong}))
    assert ask(Fields({**body, "top_k": -1})).options.top_k == 0
    assert ask(Fields({**body, "top_k": 40.0})).options.top_k == 40


def test_null_and_what_nobody_knows_is_passed_over() -> None:
    body: dict[str, Any] = {
        "messages": [{**HELLO, "mood": "good"}],
        "temperature": None,
        "user": {"a": []},
    }
    asked = Fields(body).shaped(bodies.Chat)
    assert asked.temperature is None
    assert asked.messages[0].content == "Hello"


@pytest.mark.parametrize("body", [bodies.Chat, bodies.OllamaOptions, bodies.AnthropicMessages])
@pytest.mark.parametrize("name", ["top_p", "min_p", "frequency_penalty", "presence_penalty"])
def test_ranges_of_sampling_are_those_of_the_sampler(body: Any, name: str) -> None:
    schema = plain_schema(body)["properties"].get(name)
    if schema is None:  # Anthropic has few of them
        assert body is bodies.AnthropicMessages
        return
    for limit, step in ((schema["minimum"], -1e-9), (schema["maximum"], 1e-9)):
        SamplingParameters(**{name: limit})
        with pytest.raises(ValueError, match=name):
            SamplingParameters(**{name: limit + step})
