"""Whatever stands in any place of a request, it is read or refused by name: never a defect."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import EdgeError
from edge.server import anthropic_messages, embeddings, ollama, openai_fields, openai_responses
from edge.server.answers import AnswerPiece, Begin, End, Happening, Question
from edge.server.fields import Fields
from edge.server.refusals import Refusal
from edge.text.answer_parts import ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "It.", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "g",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "x"}},
    },
}
CUSTOM_CALL = {"id": "d", "type": "custom", "custom": {"name": "g", "input": "x"}}
GONE = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "bash"}}
TEXT = {"type": "text", "text": "Look."}
IMAGE = {"type": "image"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}
OPENAI_MESSAGES = [
    {"role": "developer", "content": [TEXT]},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL, CUSTOM_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": [TEXT, {"type": "image_url"}]},
]
SAMPLING = {"temperature": 1, "top_p": 0.5, "top_k": 3, "seed": 7, "stop": ["x"]}

BODIES: dict[str, tuple[Callable[[Fields], object], dict[str, Any]]] = {
    "chat": (
        openai_fields.chat_question,
        {
            "messages": OPENAI_MESSAGES,
            "tools": [{"type": "function", "function": FUNCTION}, CUSTOM],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "chat_template_kwargs": {"a": 1},
            "service_tier": "flex",
            "reasoning_effort": "low",
            **SAMPLING,
        },
    ),
    "completion": (
        openai_fields.completion_question,
        {"prompt": ["a", [1, 2]], "suffix": "b", "max_tokens": 3, "n": 2, "logprobs": 1},
    ),
    "responses": (
        openai_responses.question_of,
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"type": "reasoning", "summary": [TEXT], "content": [TEXT]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
                {"type": "local_shell_call", "call_id": "e", "action": {"command": ["ls"]}},
                {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "a"}]},
                {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "z"},
                {"type": "web_search_call", "id": "w"},
                {"type": "additional_tools", "tools": [{"type": "function", **FUNCTION}]},
                {"type": "configuration_update", "reasoning": {"effort": "low"}},
            ],
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "custom", "name": "g", "format": {"syntax": "lark", "definition": "x"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
            ],
            "tool_choice": {"type": "function", "name": "f", "namespace": "n"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "high"},
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "service_tier": "flex",
            "user": "u",
        },
    ),
    "anthropic": (
        anthropic_messages.question_of,
        {
            "max_tokens": 9,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT, DOCUMENT]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm."},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                        {"type": "server_tool_use", "id": "s"},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, IMAGE]},
                        {"type": "search_result", "title": "t", "source": "s", "content": [TEXT]},
                    ],
                },
                {"role": "system", "content": [GONE], "clear_at": "never"},
            ],
            "tools": [
                {"name": "f", "input_schema": SCHEMA},
                {"type": "bash_20250124", "name": "bash"},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "stop_sequences": ["x"],
        },
    ),
    "ollama": (
        ollama.chat_question,
        {
            "messages": [{"role": "user", "content": "Hello", "images": []}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "format": SCHEMA,
            "think": "low",
            "options": {**SAMPLING, "num_predict": 3, "presence_penalty": 1},
        },
    ),
    "generate": (
        ollama.generate_question,
        {"prompt": "a", "suffix": "b", "raw": False, "system": "c", "context": [], "options": {}},
    ),
    "embeddings": (embeddings.openai_asked, {"input": ["a", [1]], "dimensions": 3}),
    "embed": (embeddings.ollama_asked, {"input": ["a"], "truncate": False}),
}  # fmt: skip

Place = tuple[str | int, ...]

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["text", "function", "custom", "namespace", "tool_use", "c", "f", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "name", "content", "text", "\ud800"]), inner)
    ),
    max_leaves=6,
)


def places(value: object, before: Place = ()) -> Iterator[Place]:
    """Of everything in it."""
    if before:
        yield before
    for name in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from places(value[name], (*before, name))  # type: ignore[index]


def changed(body: dict[str, Any], place: Place, into: object) -> dict[str, Any]:
    found: Any = copy.deepcopy(body)
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = into
    whole: dict[str, Any] = found
    return whole


@pytest.mark.parametrize("dialect", BODIES)
def test_a_whole_body_is_read(dialect: str) -> None:
    """Or the next test would change what is refused anyway."""
    ask, body = BODIES[dialect]
    ask(Fields(body))


@pytest.mark.parametrize("dialect", BODIES)
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_read_or_refused(dialect: str, data: st.DataObject) -> None:
    ask, body = BODIES[dialect]
    place = data.draw(st.sampled_from(sorted(places(body), key=repr)))
    body = changed(body, place, data.draw(ANYTHING))
    try:
        question = ask(Fields(body))
    except (Refusal, EdgeError):
        return
    if dialect == "responses":
        assert isinstance(question, Question)
        told = asyncio.run(
            whole(openai_responses.ResponsesTranslator(model="m", question=question))
        )
        assert json.dumps(told)


async def whole(translator: openai_responses.ResponsesTranslator) -> dict[str, Any]:
    """What is told back with calls of each of the tools."""

    async def happening() -> AsyncIterator[Happening]:
        yield Begin(prompt_tokens=1)
        names = [tool["function"]["name"] for tool in translator.question.tools]  # type: ignore[index]
        calls = tuple(ToolCall(name=name, arguments={"input": "x"}) for name in names)
        yield AnswerPiece(answer=0, calls=calls)
        yield End(answer=0, why="stop", new_tokens=1, calls=len(calls))

    return await translator.whole(happening())
