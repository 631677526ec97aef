"""What Anthropic's clients send, made into a question: each of its fields has its say."""

from __future__ import annotations

from typing import Any

import pytest

from edge.pictures.messages import NOT_SEEN
from edge.server.anthropic_messages import question_of
from edge.server.fields import Fields
from edge.server.refusals import Refusal

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


WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def tools_of(*tools: dict[str, Any], **body: object) -> dict[str, Any]:
    """What the model is told that each of them takes, by name."""
    question = question_of(Fields({**ASKED, "tools": list(tools), **body}))
    functions: list[Any] = [tool["function"] for tool in question.tools]
    return {each["name"]: each["parameters"] for each in functions}


def test_of_tools_that_a_service_runs_the_model_is_not_told() -> None:
    assert list(tools_of(SEARCH, WEATHER, {**WEATHER, "name": "b", "type": "custom"})) == [
        *("weather", "b")
    ]
    for tools, choice, said in (
        ([SEARCH], {"type": "auto"}, "'web_search_20250305', which this server does not run"),
        ([SEARCH, WEATHER], {"type": "tool", "name": "web_search"}, "wants 'web_search'"),
    ):
        with pytest.raises(Refusal) as told:
            tools_of(*tools, tool_choice=choice)
        assert said in told.value.message
    assert tools_of(SEARCH, tool_choice={"type": "none"}) == {}


def test_of_tools_that_clients_run_the_model_is_told_what_they_take() -> None:
    """Claude knows them by their types."""
    kinds = ("bash_20250124", "text_editor_20241022", "text_editor_20250728", "memory_20250818")
    told = tools_of(*({"type": kind, "name": kind} for kind in kinds))
    assert all("command" in parameters["required"] for parameters in told.values())
    bash, old_editor, editor, memory = (each["properties"] for each in told.values())
    assert set(bash) == {"command", "restart"}
    assert "undo_edit" in old_editor["command"]["enum"]
    assert "undo_edit" not in editor["command"]["enum"]
    assert "insert_text" in editor.keys() - old_editor.keys()
    assert {"rename", "delete"} < set(memory["command"]["enum"])


def said(*parts: dict[str, Any], role: str = "user") -> list[Any]:
    messages = [*ASKED["messages"], {"role": role, "content": list(parts)}]
    return list(question_of(Fields({**ASKED, "messages": messages})).messages)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TEXT = {"type": "text", "text": "Look."}


def test_texts_of_documents_are_read() -> None:
    document = {
        "type": "document",
        "title": "Cats",
        "source": {"type": "text", "media_type": "text/plain", "data": "They sleep."},
    }
    inner = {"type": "content", "content": [{"type": "text", "text": "They eat."}]}
    found = {"type": "search_result", "title": "Barn", "source": "b.txt", "content": [TEXT]}
    (message,) = said(document, {**document, "source": inner}, found, TEXT)
    assert message["content"].endswith(
        "Cats\nThey sleep.\nCats\nThey eat.\nBarn\nb.txt\nLook.\nLook."
    )
    deep: dict[str, Any] = TEXT
    for _ in range(2000):
        deep = {"type": "document", "source": {"type": "content", "content": [deep]}}
    for refused in (deep, {"type": "document", "source": {"type": "base64"}}):
        with pytest.raises(Refusal, match="only text"):
            said(refused)


def test_an_agent_that_looked_at_a_picture_goes_on() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [TEXT, IMAGE]}
    assert [part["type"] for part in said(result)[-1]["content"]] == ["text", "image"]
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    found = said({**result, "content": [TEXT, stored]})[-1]["content"]
    assert [part["text"] for part in found] == ["Look.", NOT_SEEN]


def test_what_a_service_did_before_is_passed_over() -> None:
    """A conversation that began elsewhere goes on."""
    search = {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "1", "content": []}
    summary = {"type": "compaction", "content": "We met."}
    assert said(search, found, TEXT, role="assistant")[-1]["content"] == "Look."
    assert said(summary, role="assistant")[-1]["content"] == "We met."


def test_the_model_is_told_that_a_tool_has_failed() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no such file"}
    assert said({**result, "is_error": True})[-1]["content"] == "Error: no such file"
    assert said({**result, "is_error": False})[-1]["content"] == "no such file"


def test_servers_of_tools_are_refused() -> None:
    assert question_of(Fields({**ASKED, "mcp_servers": []}))
    with pytest.raises(Refusal, match="mcp_servers is not"):
        question_of(Fields({**ASKED, "mcp_servers": [{"type": "url", "url": "https://a.example"}]}))


@pytest.mark.parametrize("name", ["container", "compaction", "thread"])
def test_what_would_need_a_memory_or_a_service_is_refused(name: str) -> None:
    assert question_of(Fields({**ASKED, name: None}))
    with pytest.raises(Refusal, match=f"{name} is not supported: this server"):
        question_of(Fields({**ASKED, name: {"type": "create"}}))


def test_tokens_are_counted_where_a_summary_is_asked_for() -> None:
    asked = Fields({**ASKED, "compaction": {"type": "enabled"}})
    assert question_of(asked, counts_only=True).messages


def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": kind, "tool": tool}]
    return {"role": "system", "content": content}


def test_messages_change_what_may_be_called() -> None:
    """The tools are those at the end, wherever a message took one away or brought it."""
    named: dict[str, Any] = {"type": "tool_reference", "name": "weather"}
    other = {"type": "tool_definition", "definition": {**WEATHER, "name": "other"}}
    gone, back = change("tool_removal", named), change("tool_addition", named)
    user = ASKED["messages"]

    def told(*changes: dict[str, Any]) -> list[str]:
        return list(tools_of(WEATHER, {**WEATHER, "name": "b"}, messages=[*user, *changes]))

    assert told(gone) == told(gone, back, gone) == ["b"]
    assert told(gone, back) == ["b", "weather"]
    assert told(gone, change("tool_addition", other)) == ["b", "other"]
    summary = {"type": "compaction", "content": "x", "tool_changes": gone["content"]}
    assert told({"role": "assistant", "content": [summary]}) == ["b"]
    server = {"type": "mcp_toolset_reference", "server_name": "s"}
    assert told(change("tool_removal", server)) == ["weather", "b"]
    question = question_of(Fields({**ASKED, "tools": [WEATHER], "messages": [*user, back]}))
    assert [each["role"] for each in question.messages] == ["user"], "it says nothing"
    for wrong, why in (
        ({**named, "name": "c"}, "'c', which is not among the tools"),
        ({"type": "x"}, "type is one of"),
        (None, "tool is missing"),
    ):
        with pytest.raises(Refusal, match=why):
            told(change("tool_removal", wrong))  # type: ignore[arg-type]


def test_a_reminder_for_one_turn_is_gone_with_the_next() -> None:
    hello, again = ASKED["messages"][0], {"role": "user", "content": "Again."}
    reminder = {"role": "system", "content": "Be short.", "clear_at": "next_user_message"}
    lasting = {**reminder, "clear_at": "never"}
    for messages, left in (
        ([hello, reminder], ["Hello", "Be short."]),
        ([hello, reminder, again], ["Hello\n\nAgain."]),
        ([hello, lasting, again], ["Hello", "Be short.", "Again."]),
    ):
        question = question_of(Fields({**ASKED, "messages": messages}))
        assert [each["content"] for each in question.messages] == left


def test_a_message_says_how_much_is_thought_from_then_on() -> None:
    effort = {"role": "system", "output_config": {"effort": "low"}}
    asked = {**ASKED, "output_config": {"effort": "high"}}
    question = question_of(Fields({**asked, "messages": [*ASKED["messages"], effort]}))
    assert question.variables["reasoning_effort"] == "low"
    assert len(question.messages) == 1
