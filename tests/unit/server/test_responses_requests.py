"""What clients of OpenAI's responses send, made into a question, and what they are told back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edge.pictures.messages import NOT_SEEN
from edge.server.answers import AnswerPiece, Begin, End, Happening
from edge.server.fields import Fields
from edge.server.openai_responses import ResponsesTranslator, question_of
from edge.server.refusals import Refusal
from edge.text.answer_parts import ToolCall
from tests.support.scripted_models import likely, with_logprob

USER = {"role": "user", "content": "Look."}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def messages(*items: dict[str, Any]) -> list[Any]:
    return list(question_of(Fields({"input": [USER, *items]})).messages)[1:]


async def happening(*calls: ToolCall) -> AsyncIterator[Happening]:
    yield Begin(prompt_tokens=1)
    yield AnswerPiece(answer=0, calls=calls)
    yield End(answer=0, why="stop", new_tokens=2, calls=len(calls))


def reply(body: dict[str, Any], *calls: ToolCall) -> dict[str, Any]:
    translator = ResponsesTranslator(model="m", question=question_of(Fields(body)))
    return asyncio.run(translator.whole(happening(*calls)))


def test_what_was_asked_is_told_back() -> None:
    body: dict[str, Any] = {
        "input": "Look.",
        "instructions": "Be kind.",
        "metadata": {"run": "7"},
        "tools": [FUNCTION, PATCH, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": True,
    }
    told = reply(body)
    for name in ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls"):
        assert told[name] == body[name]
    assert told["reasoning"] == {"effort": "low", "summary": None}
    assert told["text"] == {"verbosity": "low", "format": {"type": "text"}}
    assert (told["service_tier"], told["prompt_cache_key"]) == ("flex", "k")
    assert (told["store"], told["background"]) == (False, False), "nothing is kept"
    plain = reply({"input": "Look."})
    assert (plain["instructions"], plain["metadata"], plain["tools"]) == (None, {}, [])
    assert plain["tool_choice"] == "auto"


def test_calls_of_every_kind_are_read() -> None:
    call, done = messages(
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
    )
    function = {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert call["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert done == {"role": "tool", "content": "Done.", "tool_call_id": "c"}
    action = {"type": "exec", "command": ["ls"]}
    call, done = messages(
        {"type": "local_shell_call", "call_id": "d", "action": action},
        {"type": "local_shell_call_output", "id": "d", "output": "a b"},
    )
    assert call["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": action}
    assert (done["tool_call_id"], done["content"]) == ("d", "a b")
    call, done, *_ = messages(
        {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "a"}]},
        {"type": "apply_patch_call", "call_id": "f", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "f", "status": "completed"},
    )
    assert call["tool_calls"][0]["function"]["name"] == "shell"
    assert json.loads(done["content"]) == [{"stdout": "a"}]
    call, done = messages(
        {"type": "mcp_call", "id": "g", "name": "look", "arguments": "{}", "output": "A cat."}
    )
    assert call["tool_calls"][0]["id"] == done["tool_call_id"] == "g"
    assert done["content"] == "A cat."


def test_what_a_service_did_before_is_passed_over() -> None:
    """A conversation that began elsewhere goes on, and what was thought stays with its answer."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "Hm."}]}
    found = messages(
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        thought,
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "mcp_list_tools", "id": "l", "server_label": "x", "tools": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "So: "},
                {"type": "refusal", "refusal": "no."},
            ],
        },
    )
    assert found == [{"role": "assistant", "content": "So: no.", "reasoning_content": "Hm."}]


def test_an_agent_that_looked_at_a_picture_goes_on() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    output = [{"type": "input_text", "text": "It: "}, {"type": "input_image", "image_url": "x"}]
    told = messages(call, {"type": "function_call_output", "call_id": "c", "output": output})
    assert [part["text"] for part in told[-1]["content"]] == ["It: ", NOT_SEEN]
    with pytest.raises(Refusal, match="only text"):
        messages({"role": "user", "content": [{"type": "input_file", "file_data": "x"}]})


def test_a_tool_that_takes_a_text_is_called_with_one() -> None:
    body: dict[str, Any] = {"input": "x", "tools": [PATCH, FUNCTION]}
    question = question_of(Fields(body))
    functions: list[Any] = [tool["function"] for tool in question.tools]
    assert [each["name"] for each in functions] == ["apply_patch", "look"]
    assert functions[0]["parameters"]["required"] == ["input"]
    assert "start: /.+/" in functions[0]["description"]
    choice = {"tool_choice": {"type": "custom", "name": "apply_patch"}}
    with pytest.raises(Refusal, match=r"tools\[0\].format.syntax is 'lark', to which"):
        question_of(Fields({**body, **choice}))
    plain = {**PATCH, "format": {"type": "text"}}
    (forced,) = question_of(Fields({**body, **choice, "tools": [plain, FUNCTION]})).forced
    assert forced["function"]["name"] == "apply_patch"  # type: ignore[index]
    told = reply(
        body,
        ToolCall(name="apply_patch", arguments={"input": "*** Begin"}),
        ToolCall(name="look", arguments={"input": "x"}),
    )
    patch, look = told["output"]
    assert (patch["type"], look["type"]) == ("custom_tool_call", "function_call")
    assert patch["input"] == "*** Begin"


def test_logprobs_are_told_of_what_is_said_and_of_nothing_else() -> None:
    other = likely("No", -2.0)
    tokens = [
        with_logprob(text, -i, *top)
        for i, (text, top) in enumerate([("Hm", ()), ("Yes", (other,)), (".", ()), ("", ())])
    ]

    async def thinking() -> AsyncIterator[Happening]:
        yield Begin(prompt_tokens=1)
        yield AnswerPiece(answer=0, thought="Hm", tokens=(tokens[0],))
        yield AnswerPiece(answer=0, said="Yes", tokens=(tokens[1],))
        yield AnswerPiece(answer=0, said=".", tokens=(tokens[2],))
        yield AnswerPiece(answer=0, tokens=(tokens[3],))
        yield End(answer=0, why="stop", new_tokens=4)

    async def told(body: dict[str, Any]) -> list[Any]:
        question = question_of(Fields({"input": "x", **body}))
        return [
            each
            async for each in ResponsesTranslator(model="m", question=question).events(thinking())
        ]

    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = asyncio.run(told(asked))
    thought, said = events[-1]["response"]["output"]
    assert "logprobs" not in thought["content"][0]
    spelt = [(each["token"], each["logprob"]) for each in said["content"][0]["logprobs"]]
    assert spelt == [("Yes", -1), (".", -2), ("", -3)]
    assert said["content"][0]["logprobs"][0]["top_logprobs"][0]["token"] == "No"
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in each["logprobs"]] for each in deltas] == [["Yes"], ["."]]
    assert question_of(Fields({"input": "x", **asked})).options.logprobs == 1
    events = asyncio.run(told({"top_logprobs": 1}))
    assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == []
    assert question_of(Fields({"input": "x", "top_logprobs": 1})).options.logprobs is None


def test_tools_of_a_namespace_are_offered_and_called() -> None:
    """Codex has those of MCP servers so, and its own of other agents."""
    cats = {
        "type": "namespace",
        "name": "mcp__cats",
        "description": "x",
        "tools": [FUNCTION, PATCH],
    }
    body: dict[str, Any] = {"input": "x", "tools": [FUNCTION, cats, {"type": "web_search"}]}
    question = question_of(Fields(body))
    functions: list[Any] = [tool["function"] for tool in question.tools]
    names = ["look", "mcp__cats__look", "mcp__cats__apply_patch"]
    assert [each["name"] for each in functions] == names
    assert functions[1]["parameters"] == FUNCTION["parameters"]
    choice = {"type": "function", "name": "look", "namespace": "mcp__cats"}
    assert question_of(Fields({**body, "tool_choice": choice})).forced == question.tools[1:2]
    given = {"input": "*** Begin"}
    told = reply(body, *(ToolCall(name=name, arguments=given) for name in names))
    assert [(each["type"], each["name"], each.get("namespace")) for each in told["output"]] == [
        ("function_call", "look", None),
        ("function_call", "look", "mcp__cats"),
        ("custom_tool_call", "apply_patch", "mcp__cats"),
    ]
    before = [
        message["tool_calls"][0]["function"]["name"]
        for each in told["output"]
        for message in messages(each)
    ]
    assert before == names


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_not_found"),
        ({"conversation": "conv_1"}, "previous_response_not_found"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "previous_response_not_found"),
        ({"background": True}, None),
        ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, None),
        ({"metadata": 7}, None),
        ({"tools": [{"type": "custom"}]}, None),
        ({"tools": [{"type": "namespace", "tools": []}]}, None),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [7]}]}, None),
        ({"tool_choice": {"type": "custom"}}, None),
    ],
)
def test_what_would_have_to_be_remembered_or_read_is_refused(
    body: dict[str, Any], code: str | None
) -> None:
    with pytest.raises(Refusal) as told:
        question_of(Fields({"input": "x", **body}))
    assert (told.value.status, told.value.code) == (400, code)


def test_a_call_that_must_be_made_keeps_to_a_regular_expression() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b+"}
    choice = {"type": "custom", "name": "apply_patch"}
    body = {"input": "x", "tools": [{**PATCH, "format": form}], "tool_choice": choice}
    forced: list[Any] = list(question_of(Fields(body)).forced)
    assert forced[0]["function"]["parameters"]["properties"] == {
        "input": {"type": "string", "pattern": "^(?:a|b+)$"}
    }


def test_tools_that_come_with_the_conversation_are_offered_and_called() -> None:
    later = {"type": "namespace", "name": "n", "tools": [{**FUNCTION, "name": "later"}]}
    items = [
        USER,
        {"type": "additional_tools", "role": "developer", "tools": [PATCH]},
        {"type": "tool_search_call", "arguments": {}, "execution": "client"},
        {"type": "tool_search_output", "tools": [later, FUNCTION], "execution": "client"},
    ]
    body = {"input": items, "tools": [FUNCTION]}
    tools: list[Any] = list(question_of(Fields(body)).tools)
    assert [each["function"]["name"] for each in tools] == ["look", "apply_patch", "n__later"]
    told = reply(
        body,
        ToolCall(name="apply_patch", arguments={"input": "x"}),
        ToolCall(name="n__later", arguments={}),
    )
    patch, later_call = told["output"]
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "x")
    assert (later_call["name"], later_call["namespace"]) == ("later", "n")


def test_the_last_update_of_a_conversation_counts() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"const": 7}}
    updates = [
        {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": form}},
        {"type": "configuration_update", "reasoning": {"effort": "medium"}},
    ]
    body = {"input": [USER, *updates], "reasoning": {"effort": "high", "summary": "auto"}}
    question = question_of(Fields(body))
    assert question.variables["reasoning_effort"] == "medium"
    assert question.options.json_schema == {"const": 7}
    told = reply(body)
    assert told["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert told["text"]["format"] == form


def test_a_result_may_name_its_tool_alone() -> None:
    result = {"type": "function_call_output", "output": "A cat."}
    (found,) = messages({**result, "name": "look", "namespace": "n"})
    assert found == {"role": "tool", "content": "A cat.", "name": "n__look"}
    with pytest.raises(Refusal, match="name is missing"):
        messages(result)


@pytest.mark.parametrize("kind", ["compaction", "compaction_trigger"])
def test_what_only_the_service_can_sum_up_is_refused(kind: str) -> None:
    with pytest.raises(Refusal, match=rf"input\[1\].type {kind} .* message"):
        messages({"type": kind, "encrypted_content": "x"})


@pytest.mark.parametrize(
    "tool", [{"name": {}}, {"name": {}, "type": None}, {"name": [], "type": 1}]
)
def test_a_tool_without_a_kind_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"tools\[0\].type"):
        question_of(Fields({"input": "x", "tools": [tool]}))


def test_what_a_service_would_run_may_be_called_anything() -> None:
    tools = [{"type": "web_search", "name": {}}, FUNCTION, FUNCTION]
    (offered,) = question_of(Fields({"input": "x", "tools": tools})).tools
    assert offered["function"]["name"] == "look"  # type: ignore[index]
