"""What happens, in the words of each dialect: thoughts apart, several answers, none said at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edge.answers.text import Token, TokenLogprob
from edge.server import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_fields,
    openai_responses,
)
from edge.server.answers import AnswerPiece, Begin, End, Happening, Question
from edge.server.fields import Fields
from edge.server.gate import Gate, has_room
from edge.server.keys import Caller
from edge.server.refusals import Refusal
from edge.server.tools import text_takers
from edge.text.answer_parts import ToolCall
from tests.support.scripted_models import with_logprob

THINKING: Sequence[Happening] = (
    Begin(prompt_tokens=7),
    AnswerPiece(answer=0, thought="Hm. "),
    AnswerPiece(answer=0, thought="So", said="Yes"),
    AnswerPiece(answer=0, said=", I do."),
    End(answer=0, why="stop", new_tokens=6, found_tokens=4, thought_tokens=2, stopped_by="END"),
)
SILENT: Sequence[Happening] = (Begin(prompt_tokens=2), End(answer=0, why="length", new_tokens=1))


async def stream(happenings: Sequence[Happening]) -> AsyncGenerator[Happening]:
    for each in happenings:
        yield each


async def all_of(parts: AsyncGenerator[Any]) -> list[Any]:
    return [each async for each in parts]


def test_thoughts_are_apart_in_openai_chunks_and_wholes() -> None:
    def translator() -> openai_chat.ChatTranslator:
        return openai_chat.ChatTranslator(model="m", chat=True, with_logprobs=False)

    whole = asyncio.run(translator().whole(stream(THINKING)))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm. So", "Yes, I do.")
    assert whole["usage"] == {
        "prompt_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens": 6,
        "completion_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }
    chunks = asyncio.run(all_of(translator().chunks(stream(THINKING))))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "reasoning_content": "Hm. "},
        {"reasoning_content": "So", "content": "Yes"},
        {"content": ", I do."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["stop"]


def test_several_answers_keep_their_numbers() -> None:
    mixed = (
        Begin(prompt_tokens=1),
        AnswerPiece(answer=1, said="b"),
        AnswerPiece(answer=0, said="a"),
        End(answer=1, why="length", new_tokens=1),
        End(answer=0, why="stop", new_tokens=2),
    )
    translator = openai_chat.ChatTranslator(model="m", chat=False, with_logprobs=False)
    whole = asyncio.run(translator.whole(stream(mixed)))
    told = [(each["index"], each["text"], each["finish_reason"]) for each in whole["choices"]]
    assert told == [(0, "a", "stop"), (1, "b", "length")]
    assert whole["usage"]["completion_tokens"] == 3


def test_blocks_of_anthropic_begin_and_stop_in_turn() -> None:
    events = asyncio.run(
        all_of(anthropic_messages.MessagesTranslator(model="m").events(stream(THINKING)))
    )
    assert [event["type"] for event in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    whole = asyncio.run(anthropic_messages.MessagesTranslator(model="m").whole(stream(THINKING)))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["content"][1]["text"] == "Yes, I do."
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 6}
    assert whole["usage"] == usage, "what was found is not counted as input"
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


def test_items_of_a_response_begin_and_end_in_turn() -> None:
    def translator() -> openai_responses.ResponsesTranslator:
        return openai_responses.ResponsesTranslator(model="m", question=Question())

    events = asyncio.run(all_of(translator().events(stream(THINKING))))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    whole = asyncio.run(translator().whole(stream(THINKING)))
    assert [item["content"][0]["text"] for item in whole["output"]] == ["Hm. So", "Yes, I do."]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    cut = asyncio.run(translator().whole(stream(SILENT)))
    assert (cut["status"], cut["output"]) == ("incomplete", [])


def test_what_agents_send_to_responses_is_read() -> None:
    """Tools that a service would run are passed over, and a result may come in parts."""
    asked = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "A "},
                {"type": "input_text", "text": "cat."},
            ],
        },
    ]
    tools = [{"type": "web_search"}, {"type": "function", "name": "look"}]
    question = openai_responses.question_of(Fields({"input": asked, "tools": tools}))
    assert question.messages[-1] == {"role": "tool", "content": "A cat.", "tool_call_id": "c"}
    assert [tool["function"] for tool in question.tools] == [
        {"name": "look", "description": "", "parameters": {}}
    ]


CALLING: Sequence[Happening] = (
    Begin(prompt_tokens=3),
    AnswerPiece(answer=0, said="Let me see."),
    AnswerPiece(answer=0, calls=(ToolCall(name="weather", arguments={"city": "Rom"}),)),
    AnswerPiece(answer=0, calls=(ToolCall(name="clock", arguments={}),)),
    End(answer=0, why="stop", new_tokens=9, calls=2),
)


def test_calls_of_tools_in_openai_chunks_and_wholes() -> None:
    def translator() -> openai_chat.ChatTranslator:
        return openai_chat.ChatTranslator(model="m", chat=True, with_logprobs=False)

    (choice,) = asyncio.run(translator().whole(stream(CALLING)))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Rom"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    chunks = asyncio.run(all_of(translator().chunks(stream(CALLING))))
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
    assert [delta["index"] for delta in deltas] == [0, 0, 1, 1]
    assert [delta["function"].get("name") for delta in deltas] == ["weather", None, "clock", None]
    assert deltas[1]["function"]["arguments"] == '{"city": "Rom"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_tool_that_takes_a_text_is_called_with_one_in_chat() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    custom = {"name": "patch", "description": "Changes files.", "format": form}
    before = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "Change it."},
            {"role": "assistant", "tool_calls": [before]},
            {"role": "tool", "tool_call_id": "c", "content": "Done."},
        ],
        "tools": [{"type": "custom", "custom": custom}],
    }
    question = openai_fields.chat_question(Fields(body))
    tools: list[Any] = list(question.tools)
    (told,) = (tool["function"] for tool in tools)
    assert told["parameters"]["required"] == ["input"]
    assert "start: /.+/" in str(told["description"])
    messages: list[Any] = list(question.messages)
    (call,) = messages[1]["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}
    choice = {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
    with pytest.raises(Refusal, match=r"tools\[0\].custom.format.grammar.syntax is 'lark'"):
        openai_fields.chat_question(Fields({**body, **choice}))

    def translator() -> openai_chat.ChatTranslator:
        takers = text_takers(Fields(body))
        return openai_chat.ChatTranslator(
            model="m", chat=True, with_logprobs=False, text_takers=takers
        )

    made = (
        Begin(prompt_tokens=3),
        AnswerPiece(answer=0, calls=(ToolCall(name="patch", arguments={"input": "*** Add"}),)),
        AnswerPiece(answer=0, calls=(ToolCall(name="patch", arguments={"text": 1}),)),
        End(answer=0, why="stop", new_tokens=9, calls=2),
    )
    (whole,) = asyncio.run(translator().whole(stream(made)))["choices"]
    patch, wrong = whole["message"]["tool_calls"]
    assert (patch["type"], patch["custom"]) == ("custom", {"name": "patch", "input": "*** Add"})
    assert wrong["function"]["arguments"] == '{"text": 1}', "it gave no text"
    chunks = asyncio.run(all_of(translator().chunks(stream(made))))
    first, second, *_ = (d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ()))
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert second == {"index": 0, "custom": {"input": "*** Add"}}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"web_search_options": {}}, "web_search_options is not supported: this server searches"),
        ({"moderation": {"model": "x"}}, "moderation is not supported: this server judges"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "give tool_calls"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "give its transcript"),
    ],
)
def test_what_a_service_would_do_is_refused(body: dict[str, Any], why: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], **body}
    with pytest.raises(Refusal, match=why):
        openai_fields.chat_question(Fields(asked))


def test_a_refusal_of_before_is_what_was_said() -> None:
    message = {"role": "assistant", "content": None, "refusal": "No."}
    question = openai_fields.chat_question(Fields({"messages": [message]}))
    assert question.messages[0]["content"] == "No."


def test_the_tokens_of_a_call_are_told_once() -> None:
    """With its first part, and not with those of text beside it."""
    tokens = tuple(with_logprob(text, -1.0, token_id=each) for each, text in enumerate(("a", "bc")))
    told = (
        Begin(prompt_tokens=3),
        AnswerPiece(answer=0, calls=(ToolCall(name="clock", arguments={}),) * 2, tokens=tokens),
        End(answer=0, why="stop", new_tokens=2, calls=2),
    )
    chat = openai_chat.ChatTranslator(model="m", chat=True, with_logprobs=True)
    chunks = asyncio.run(all_of(chat.chunks(stream(told))))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [each["token"] for each in found[0]["content"]] == ["a", "bc"]
    assert found[1:] == [None] * 4


def test_tokens_without_a_word_go_with_what_comes_next() -> None:
    """Behind a call comes no empty text, and an answer of no words has a role."""
    tokens = [
        with_logprob(text, -1.0, token_id=each) for each, text in enumerate(("", "", "<end>"))
    ]
    told = (
        Begin(prompt_tokens=3),
        AnswerPiece(answer=0, tokens=(tokens[0],)),
        AnswerPiece(answer=0, calls=(ToolCall(name="clock", arguments={}),), tokens=(tokens[1],)),
        AnswerPiece(answer=0, tokens=(tokens[2],)),
        End(answer=0, why="stop", new_tokens=3, calls=1),
        End(answer=1, why="stop", new_tokens=1),
    )
    chat = openai_chat.ChatTranslator(model="m", chat=True, with_logprobs=True)
    choices = [c["choices"][0] for c in asyncio.run(all_of(chat.chunks(stream(told))))]
    assert [[*choice["delta"]] for choice in choices] == [
        ["tool_calls", "role"],
        ["tool_calls"],
        [],
        ["role", "content"],
    ]
    counts = [len((choice["logprobs"] or {"content": ()})["content"]) for choice in choices]
    assert counts == [2, 0, 1, 0]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    def token(text: str) -> Token:
        return with_logprob(text, -1.0)

    told = (
        Begin(prompt_tokens=3),
        AnswerPiece(answer=0, said="ab", tokens=(token("a"), token("b"))),
        AnswerPiece(answer=1, said="xyz", tokens=(token("xyz"),)),
        AnswerPiece(answer=0, said="cd", tokens=(token("cd"),)),
        AnswerPiece(answer=0, said="e", tokens=(token("e"),)),
        End(answer=0, why="stop", new_tokens=4),
        End(answer=1, why="stop", new_tokens=1),
    )

    def translator() -> openai_chat.ChatTranslator:
        return openai_chat.ChatTranslator(model="m", chat=False, with_logprobs=True)

    choices = [c["choices"][0] for c in asyncio.run(all_of(translator().chunks(stream(told))))]
    offsets = [
        offset
        for each in choices
        if each["index"] == 0 and each["logprobs"]
        for offset in each["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2, 4]
    whole = asyncio.run(translator().whole(stream(told)))["choices"]
    assert [each["logprobs"]["text_offset"] for each in whole] == [offsets, [0]]


def test_calls_of_tools_are_blocks_and_items_of_their_own() -> None:
    events = asyncio.run(
        all_of(anthropic_messages.MessagesTranslator(model="m").events(stream(CALLING)))
    )
    parts = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert parts == ['{"city": "Rom"}', "{}"]
    begun = [e["index"] for e in events if e["type"] == "content_block_start"]
    assert begun == [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    whole = asyncio.run(anthropic_messages.MessagesTranslator(model="m").whole(stream(CALLING)))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert (whole["content"][1]["input"], whole["stop_reason"]) == ({"city": "Rom"}, "tool_use")
    translator = openai_responses.ResponsesTranslator(model="m", question=Question())
    response = asyncio.run(translator.whole(stream(CALLING)))
    assert [item["type"] for item in response["output"]] == [
        *("message", "function_call", "function_call")
    ]
    assert response["output"][1]["arguments"] == '{"city": "Rom"}'
    line = asyncio.run(ollama.OllamaTranslator(model="m", chat=True).whole(stream(CALLING)))
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rom"}


def test_a_conversation_with_tools_is_the_same_in_every_dialect() -> None:
    """What was called, and what came of it, as chat templates take it."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    facts = {"name": "weather", "description": "It."}
    openai_body = Fields(
        {
            "tools": [{"type": "function", "function": {**facts, "parameters": parameters}}],
            "messages": [
                {"role": "user", "content": "How is Rom?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Rom"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "Dry."},
            ],
        }
    )
    anthropic_body = Fields(
        {
            "max_tokens": 5,
            "tools": [{**facts, "input_schema": parameters}],
            "messages": [
                {"role": "user", "content": "How is Rom?"},
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "c1",
                            "name": "weather",
                            "input": {"city": "Rom"},
                        }
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Dry."}],
                },
            ],
        }
    )
    response_body = Fields(
        {
            "tools": [{"type": "function", **facts, "parameters": parameters}],
            "input": [
                {"role": "user", "content": "How is Rom?"},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "weather",
                    "arguments": '{"city": "Rom"}',
                },
                {"type": "function_call_output", "call_id": "c1", "output": "Dry."},
            ],
        }
    )
    asked = [
        openai_fields.chat_question(openai_body),
        anthropic_messages.question_of(anthropic_body),
        openai_responses.question_of(response_body),
    ]
    for question in asked:
        assert question.messages == asked[0].messages
        assert question.tools == asked[0].tools
    function = {"name": "weather", "arguments": {"city": "Rom"}}
    assert asked[0].messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_of_no_words(chat: bool) -> None:
    whole = asyncio.run(
        openai_chat.ChatTranslator(model="m", chat=chat, with_logprobs=True).whole(stream(SILENT))
    )
    assert whole["choices"][0]["finish_reason"] == "length"
    told = asyncio.run(anthropic_messages.MessagesTranslator(model="m").whole(stream(SILENT)))
    assert (told["content"], told["stop_reason"]) == ([], "max_tokens")
    line = asyncio.run(ollama.OllamaTranslator(model="m", chat=chat).whole(stream(SILENT)))
    assert (line["done"], line["done_reason"], line["eval_count"]) == (True, "length", 1)


@pytest.mark.parametrize("chat", [True, False])
def test_ollamas_clients_find_the_rate_at_which_tokens_were_chosen(chat: bool) -> None:
    """They divide. An answer that shows nothing until its end was not made in that moment."""
    call = ToolCall(name="f", arguments={})
    told = (
        Begin(prompt_tokens=100),
        AnswerPiece(answer=0, calls=(call,)),
        End(
            answer=0, why="stop", new_tokens=41, calls=1, first_token_s=0.5, decode_s=2.0,
        ),
    )  # fmt: skip
    line = asyncio.run(ollama.OllamaTranslator(model="m", chat=chat).whole(stream(told)))
    assert line["eval_count"] / line["eval_duration"] == pytest.approx(20e-9)
    assert line["prompt_eval_count"] / line["prompt_eval_duration"] == pytest.approx(200e-9)
    few = asyncio.run(ollama.OllamaTranslator(model="m", chat=chat).whole(stream(SILENT)))
    assert (few["eval_count"], few["eval_duration"]) == (1, 0), "of one token nothing is known"


def test_who_asks_for_much_leaves_room_for_others() -> None:
    assert has_room({}, "a", 8, most=8), "all, where nobody else asks"
    assert not has_room({"a": 8}, "a", 1, most=8)
    assert has_room({"a": 8}, "b", 1, most=8), "who has none"
    assert not has_room({"a": 8}, "b", 2, most=8)
    assert not has_room({"a": 8, "b": 1, "c": 1}, "d", 1, most=8), "there is an end to it"
    assert not has_room({"a": 6, "b": 1}, "a", 1, most=8), "more than its part"
    assert has_room({"a": 6, "b": 1}, "b", 1, most=8)
    assert has_room({"a": 4, "b": 1}, "a", 1, most=8), "a quarter is left"


def test_the_gate_counts_who_is_inside() -> None:
    async def main() -> None:
        gate, caller = Gate(3), Caller()
        async with gate.entered(2, caller):
            with pytest.raises(Refusal, match="2 answers are under way") as many:
                async with gate.entered(2, caller):
                    pass
            assert many.value.status == 429
            async with gate.entered(1, caller):
                assert gate.inside == 3
        assert gate.inside == 0
        gate.is_draining = True
        with pytest.raises(Refusal, match="shutting down") as ending:
            async with gate.entered(1, caller):
                pass
        assert ending.value.status == 503

    asyncio.run(main())


def test_a_key_has_no_more_answers_than_it_may() -> None:
    async def main() -> None:
        gate, limited = Gate(8), Caller(name="key a", most_answers=2)
        async with gate.entered(1, limited), gate.entered(3, Caller(name="key b")):
            with pytest.raises(Refusal, match="this key has 1 answers") as many:
                async with gate.entered(2, limited):
                    pass
            assert many.value.status == 429
            assert many.value.headers["Retry-After"]
            async with gate.entered(1, limited):
                assert gate.inside == 5

    asyncio.run(main())


@pytest.mark.parametrize("name", ["echo", "best_of"])
@pytest.mark.parametrize("value", [{}, [], [1], "text", True], ids=repr)
def test_what_completions_do_not_take_is_refused_whatever_it_is(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=name):
        openai_fields.completion_question(Fields({"prompt": "Once", name: value}))


def test_completions_take_what_asks_for_nothing() -> None:
    asked = {"prompt": "Once", "suffix": "", "echo": False, "best_of": 1}
    assert openai_fields.completion_question(Fields(asked)).prompts == ["Once"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("guided_regex", "[0-9]+"),
        ("guided_choice", ["a", "b"]),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_what_would_change_the_answer_and_is_not_known_is_refused(name: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(Refusal, match=f"{name} "):
        openai_fields.chat_question(Fields({**body, name: value}))
    assert openai_fields.chat_question(Fields({**body, "modalities": ["text"], "grammar": None}))


@pytest.mark.parametrize("flat", [False, True])
def test_of_allowed_tools_the_model_is_told_and_of_no_others(flat: bool) -> None:
    def named(name: str) -> dict[str, Any]:
        function = {"name": name}
        return {"type": "function", **(function if flat else {"function": function})}

    def asked(mode: str, *names: str) -> Question:
        allowed = {"mode": mode, "tools": [named(name) for name in names]}
        choice = allowed if flat else {"allowed_tools": allowed}
        body: dict[str, Any] = {
            "input": "Hi",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [named(name) for name in "abc"],
            "tool_choice": {"type": "allowed_tools", **choice},
        }
        read = openai_responses.question_of if flat else openai_fields.chat_question
        return read(Fields(body))

    def names_of(tools: Sequence[Any]) -> list[str]:
        return [tool["function"]["name"] for tool in tools]

    may, must = asked("auto", "c", "a"), asked("required", "b", "c")
    assert (names_of(may.tools), names_of(may.forced)) == (["a", "c"], [])
    assert (names_of(must.tools), names_of(must.forced)) == (["b", "c"], ["b", "c"])
    assert must.several_calls
    for mode, name, said in (("auto", "d", "'d', which is not"), ("none", "a", "mode is one of")):
        with pytest.raises(Refusal, match=said):
            asked(mode, name)


def test_allowed_tools_of_a_namespace_are_found() -> None:
    tools = [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a"}]},
        {"type": "custom", "name": "b"},
        {"type": "function", "name": "c"},
        {"type": "web_search"},
    ]
    allowed = [
        {"type": "function", "name": "a", "namespace": "n"},
        {"type": "custom", "name": "b"},
        {"type": "web_search"},
    ]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = {"input": "Hi", "tools": tools, "tool_choice": choice}
    told: list[Any] = list(openai_responses.question_of(Fields(body)).tools)
    assert [tool["function"]["name"] for tool in told] == ["n__a", "b"]


@pytest.mark.parametrize("chat", [True, False])
def test_parts_of_a_character_have_their_own_bytes(chat: bool) -> None:
    """And do not become one entry among the likeliest."""
    parts = [
        TokenLogprob(token_id=each, text="\ufffd", logprob=-1.0 - each, bytes=bytes([0xF0 + each]))
        for each in range(2)
    ]
    token = replace(with_logprob("", -1.0, *parts), chosen=parts[0])
    end = with_logprob("", -0.5)
    assert end.chosen is not None
    end = replace(end, chosen=replace(end.chosen, text="<end>", bytes=b"<end>", is_special=True))
    told = (
        Begin(prompt_tokens=3),
        AnswerPiece(answer=0, said="x", tokens=(token, end)),
        End(answer=0, why="stop", new_tokens=2),
    )
    translator = openai_chat.ChatTranslator(model="m", chat=chat, with_logprobs=True)
    found = asyncio.run(translator.whole(stream(told)))["choices"][0]["logprobs"]
    if chat:
        first, last = found["content"]
        assert (first["token"], first["bytes"]) == ("bytes:\\xf0", [0xF0])
        assert [each["bytes"] for each in first["top_logprobs"]] == [[0xF0], [0xF1]]
        assert (last["token"], last["bytes"]) == ("", [])
    else:
        assert found["tokens"] == ["bytes:\\xf0", ""]
        assert found["top_logprobs"][0] == {"bytes:\\xf0": -1.0, "bytes:\\xf1": -2.0}
