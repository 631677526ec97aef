"""Conversations of every dialect as templates want them: thoughts, calls, and turns cut in two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from edge.errors import CheckpointError, RequestError
from edge.server import anthropic_messages, ollama, openai_fields, openai_responses
from edge.server.fields import Fields
from edge.server.history import reminded, turns
from edge.server.refusals import refusal_of
from tests.support.scripted_models import ScriptedModel, Visit, word

ASKED = {"role": "user", "content": "How is Rom?"}
LATER = {"role": "user", "content": "And Bern?"}
WEATHER = {"name": "weather", "arguments": {"city": "Rom"}}
CLOCK = {"name": "clock", "arguments": {}}


def template_call(id: str, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": function}


WANTED = [
    {"role": "system", "content": "Be brief.\n\nBe kind."},
    ASKED,
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "They ask of Rom.",
        "tool_calls": [template_call("c1", WEATHER), template_call("c2", CLOCK)],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Dry."},
    {"role": "tool", "tool_call_id": "c2", "content": "Noon."},
    LATER,
]


def of_chat() -> Any:
    calls = [
        {"id": "c1", "type": "function", "function": {**WEATHER, "arguments": '{"city": "Rom"}'}},
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    thought = {"reasoning_content": "They ask of Rom."}
    body = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": calls, **thought},
        {"role": "tool", "tool_call_id": "c1", "content": "Dry."},
        {"role": "tool", "tool_call_id": "c2", "content": "Noon."},
        LATER,
    ]
    return openai_fields.chat_question(Fields({"messages": body})).messages


def of_responses() -> Any:
    body = [
        {"role": "developer", "content": "Be kind."},
        ASKED,
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Rom."}],
            "content": [{"type": "reasoning_text", "text": "They ask of Rom."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city":"Rom"}',
        },
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Dry."},
        {"type": "function_call_output", "call_id": "c2", "output": "Noon."},
        LATER,
    ]
    asked = Fields({"instructions": "Be brief.", "input": body})
    return openai_responses.question_of(asked).messages


def of_anthropic() -> Any:
    bills = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=7;"}
    use = {"type": "tool_use"}
    body = [
        ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "They ask of Rom.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {**use, "id": "c1", "name": "weather", "input": {"city": "Rom"}},
            ],
        },
        {"role": "assistant", "content": [{**use, "id": "c2", "name": "clock", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "Dry."},
                {"type": "tool_result", "tool_use_id": "c2", "content": "Noon."},
                {"type": "text", "text": "And Bern?"},
            ],
        },
    ]
    system = [bills, {"type": "text", "text": "Be brief.\n\nBe kind."}]
    asked = Fields({"max_tokens": 1, "system": system, "messages": body})
    return anthropic_messages.question_of(asked).messages


def of_ollama() -> Any:
    calls = [{"id": id, "function": each} for id, each in (("c1", WEATHER), ("c2", CLOCK))]
    body = [
        WANTED[0],
        ASKED,
        {
            "role": "assistant",
            "content": "I look.",
            "thinking": "They ask of Rom.",
            "tool_calls": calls,
        },
        *WANTED[3:],
    ]
    return ollama.chat_question(Fields({"messages": body})).messages


@pytest.mark.parametrize("ask", [of_chat, of_responses, of_anthropic, of_ollama])
def test_a_conversation_is_the_same_in_every_dialect(ask: Any) -> None:
    assert ask() == WANTED


def test_what_was_thought_for_nothing_is_left_out() -> None:
    """An answer that was cut in its thoughts: the next message is not made of them."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "Dry."}
    body = [ASKED, thought, LATER, {**said, "type": "message"}, thought]
    assert openai_responses.question_of(Fields({"input": body})).messages == [
        {"role": "user", "content": "How is Rom?\n\nAnd Bern?"},
        said,
    ]


def test_a_tool_is_named_as_ollama_names_it() -> None:
    result = {"role": "tool", "tool_name": "clock", "content": "Noon."}
    asked = ollama.chat_question(Fields({"messages": [ASKED, result]}))
    assert asked.messages[1] == {"role": "tool", "name": "clock", "content": "Noon."}


def test_late_words_of_the_system_are_a_users_where_a_template_takes_no_others() -> None:
    """Claude Code sends such; templates like Qwen 3.5's refuse them."""
    system, late = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
    user, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    asked = [system, user, late, user, answer, late]
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert reminded(asked) == [
        system,
        {"role": "user", "content": f"Hello\n\n{reminder}\n\nHello"},
        answer,
        {"role": "user", "content": reminder},
    ]
    assert reminded([user, answer, user, user]) == [user, answer, user, user]

    class Strict(ScriptedModel):
        def encode_chat(self, messages: Sequence[Any], **given: object) -> list[int]:
            if any(each["role"] == "system" for each in messages[1:]):
                raise RequestError("the chat template refused these messages")
            return super().encode_chat(messages, **given)

    async def main() -> None:
        model = Strict()
        model.says.put_nowait(word("Yes", ends=True))
        visit = Visit(model, "/v1/chat/completions", {"messages": [user, late]})
        await visit.running
        assert visit.status == 200, visit.text
        assert len(cast(Any, model.prompts[0])) == 5

    asyncio.run(main())


def alternating(messages: Sequence[Any]) -> bool:
    """As Mistral's templates want: the user and the model in turn, calls and results aside."""
    kinds = ("user", "assistant")
    said = [m["role"] for m in messages if m["role"] in kinds and not m.get("tool_calls")]
    return all(role == kinds[place % 2] for place, role in enumerate(said))


TAKES: dict[str, Any] = {
    "anything": lambda _messages: True,
    "a first one": lambda messages: all(each["role"] != "system" for each in messages[1:]),
    "turns": lambda messages: TAKES["a first one"](messages) and alternating(messages),
    "none": lambda messages: all(each["role"] != "system" for each in messages),
}


@pytest.mark.parametrize("takes", TAKES)
def test_words_of_the_system_reach_every_template(takes: str) -> None:
    """Behind a tool's result, too, and none is lost; what a template refuses is said as it says."""
    system, late = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
    asked = [system, ASKED, WANTED[2], WANTED[3], late]
    seen: list[Any] = []

    class Strict(ScriptedModel):
        def encode_chat(self, messages: Sequence[Any], **given: object) -> list[int]:
            if not TAKES[takes](messages) or len(messages) == 1:
                raise RequestError("the model's chat template refused these messages: so")
            seen.append(messages)
            return super().encode_chat(messages, **given)

    async def main() -> None:
        model = Strict()
        model.says.put_nowait(word("Yes", ends=True))
        visit = Visit(model, "/v1/chat/completions", {"messages": asked})
        await visit.running
        assert visit.status == 200, visit.text
        told = " ".join(str(each["content"]) for each in seen[-1])
        assert told.count("Be kind.") == told.count("Be brief.") == told.count("How is Rom?") == 1
        assert [each["role"] for each in seen[-1]] == {
            "anything": ["system", "user", "assistant", "tool", "system"],
            "a first one": ["system", "user", "assistant", "tool", "user"],
            "turns": ["system", "user", "assistant", "tool"],
            "none": ["user", "assistant", "tool"],
        }[takes]
        refused = Visit(model, "/v1/chat/completions", {"messages": [ASKED]})
        await refused.running
        assert (refused.status, "messages: so" in refused.text) == (400, True)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages"])
@pytest.mark.parametrize("with_system", [False, True])
def test_neighbours_of_one_role_are_joined_where_a_template_wants_turns(
    path: str, with_system: bool
) -> None:
    answer = {"role": "assistant", "content": "Dry."}
    asked = [ASKED, LATER, answer, {"role": "assistant", "content": "And warm."}, LATER]
    body: dict[str, Any] = {"messages": asked, "stream": False, "max_tokens": 5}
    if with_system and path == "/v1/messages":
        body["system"] = "Be kind."
    elif with_system:
        body["messages"] = [{"role": "system", "content": "Be kind."}, *asked]
    seen: list[Any] = []

    class Strict(ScriptedModel):
        def encode_chat(self, messages: Sequence[Any], **given: object) -> list[int]:
            if not alternating(messages) or not TAKES["none"](messages):
                raise RequestError("roles must take turns")
            seen.append(messages)
            return super().encode_chat(messages, **given)

    async def main() -> None:
        model = Strict()
        model.says.put_nowait(word("Yes", ends=True))
        visit = Visit(model, path, body)
        await visit.running
        assert visit.status == 200, visit.text

    asyncio.run(main())
    first = "Be kind.\n\n" if with_system else ""
    assert seen[-1] == [
        {"role": "user", "content": f"{first}How is Rom?\n\nAnd Bern?"},
        {"role": "assistant", "content": "Dry.\n\nAnd warm."},
        LATER,
    ]


BROKEN: dict[str, Any] = {
    '{"zone": "UT': {"arguments": '{"zone": "UT'},
    "null": {},
    "": {},
    "[1]": {"arguments": [1]},
    '"x"': {"arguments": "x"},
    "[" * 5000: {"arguments": "[" * 5000},
    '{"a": 1}': {"a": 1},
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:12])
def test_a_broken_call_does_not_end_its_conversation(text: str) -> None:
    """Other models make such calls, and they stay in the history."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": text}
    asked = [
        openai_fields.chat_question(Fields({"messages": [ASKED, said]})),
        ollama.chat_question(Fields({"messages": [ASKED, said]})),
        openai_responses.question_of(Fields({"input": [ASKED, item]})),
    ]
    for question in asked:
        calls: Any = question.messages[1]["tool_calls"]
        assert calls[0]["function"] == {"name": "f", "arguments": BROKEN[text]}


def test_items_of_other_agents_are_messages() -> None:
    """The first request to an agent that another one started has no message of the user."""
    told = {"type": "input_text", "text": "Look it up."}
    agent = {"type": "agent_message", "author": "/lead", "recipient": "/lead/child"}
    items = [
        {"type": "agent_reasoning", "text": "Hm."},
        {**agent, "content": [told]},
        {**agent, "encrypted_content": "x"},
    ]
    question = openai_responses.question_of(Fields({"input": items}))
    assert question.messages == [{"role": "user", "content": "Look it up."}]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/home/x/model/config.json is damaged", "config.json is damaged"),
        (
            "C:\\models\\a.gguf: tokenizer.ggml.pre 'x' is new",
            "a.gguf: tokenizer.ggml.pre 'x' is new",
        ),
        ("~/models/a/b.json: no (see /etc/c.json)", "b.json: no (see c.json)"),
        ("/home/John Smith/my (old) models/t.json: no", "t.json: no"),
        ("models/private/x.gguf: no", "x.gguf: no"),
        ("\\\\server\\share\\x.gguf: no", "x.gguf: no"),
        ("tensor model.embed.weight and/or its head", "tensor model.embed.weight and/or its head"),
    ],
)
def test_clients_are_told_why_a_model_cannot_be_used_without_folders(said: str, told: str) -> None:
    refusal = refusal_of(CheckpointError(said))
    assert refusal.status == 500
    assert refusal.message == f"the model cannot be used as it is: {told}"


def test_turns_are_joined_where_a_dialect_cuts_them_and_only_there() -> None:
    cut = [ASKED, LATER, {"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert turns(cut) == cut
    one, *others = turns(cut, joins=True)
    assert one == {"role": "user", "content": "How is Rom?\n\nAnd Bern?"}
    assert others == cut[2:], "only those that come first are one"
    empty = {"role": "assistant", "content": ""}
    assert turns([empty, empty], joins=True) == [empty]


def test_many_neighbours_are_joined_at_once() -> None:
    """One after the other would copy what was joined for each of them."""
    asked = [{"role": "user", "content": f"{number:099}"} for number in range(20_000)]
    (one,) = turns(asked, joins=True)
    assert len(str(one["content"])) == 20_000 * 101 - 2
