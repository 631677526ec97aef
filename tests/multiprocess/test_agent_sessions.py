"""An agent's session over HTTP, twenty turns of calls and results; then the same requests again."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import edge
from edge.demos.bundled import MODEL
from tests.multiprocess.test_structured_answers import ASKED, loaded, peers, serving
from tests.support.slow_cases import shown_in_parts

if TYPE_CHECKING:
    import anthropic
    import openai

__all__ = ["peers"]

TURNS = 20
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "b"]}},
    "required": ["path"],
    "additionalProperties": False,
}
TASK = "Read."
RESULT = "ok"
TEMPLATE = """\
{% if not messages | selectattr("role", "equalto", "user") | list %}\
{{ raise_exception("No user query found in messages.") }}{% endif %}\
{% for message in messages %}<|{{ "user" if message.role == "tool" else message.role }}|>\
{{ message.content }}\
{% for call in message.tool_calls or () %}{{ call.function.arguments | tojson }}{% endfor %}\
{% endfor %}{% for tool in tools or () %} <|tool_call>{% endfor %}<|assistant|>"""
"""Short: twenty turns have room. Calls are in a form without JSON, of which a small model would
write white space most of all."""
MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Of that form. They are tokens, as those of a model that was taught it are: else a call has 80."""
Body = dict[str, Any]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a template that takes calls and their results.

    The marks of a call have the places of the last words that its tokenizer merges.
    """
    folder = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("agent") / MODEL.name))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bpe, added = tokenizer["model"], tokenizer["added_tokens"]
    for mark in MARKS:
        word = "".join(bpe["merges"].pop())
        added.append(added[-1] | {"id": bpe["vocab"].pop(word), "content": mark})
    file.write_text(json.dumps(tokenizer))
    return folder


def shape(value: Any) -> Any:
    """Names and types, without what differs from answer to answer."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value).__name__


def said(value: Any) -> Any:
    """Without ids and times."""
    if isinstance(value, dict):
        unlike = {"id", "created", "tool_call_id", "tool_use_id"}
        return {name: said(each) for name, each in value.items() if name not in unlike}
    return [said(each) for each in value] if isinstance(value, list) else value


async def ask_openai(client: openai.AsyncOpenAI, body: Body) -> list[Any]:
    stream = await client.chat.completions.create(**body, stream=True)
    return [chunk.model_dump(exclude_unset=True) async for chunk in stream]


async def openai_session(client: openai.AsyncOpenAI) -> list[tuple[Body, list[Any]]]:
    """Each request, and what came."""
    tool = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    trace = []
    for turn in range(TURNS):
        body = {
            "model": "m",
            "messages": list(messages),
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": turn,
        }
        chunks = await ask_openai(client, body)
        trace.append((body, chunks))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "read"
        assert not any("name" in call["function"] for call in calls[1:])
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        assert set(json.loads(arguments)) == {"path"}
        function = {"name": "read", "arguments": arguments}
        id = calls[0]["id"]
        call = {"id": id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": id, "content": RESULT})
    return trace


async def ask_responses(client: openai.AsyncOpenAI, body: Body) -> list[Any]:
    stream = await client.responses.create(**body, stream=True)
    return [event.model_dump(exclude_unset=True) async for event in stream]


async def responses_session(client: openai.AsyncOpenAI) -> list[tuple[Body, list[Any]]]:
    """Likewise: what came goes back as it is."""
    tool = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": True}
    items: list[Any] = [{"role": "user", "content": TASK}]
    trace = []
    for turn in range(TURNS):
        body = {
            "model": "m",
            "input": list(items),
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "extra_body": {"seed": turn},
        }
        events = await ask_responses(client, body)
        trace.append((body, events))
        (call,) = events[-1]["response"]["output"]
        assert set(json.loads(call["arguments"])) == {"path"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
        items += [call, result]
    return trace


async def ask_anthropic(client: anthropic.AsyncAnthropic, body: Body) -> list[Any]:
    stream = await client.messages.create(**body, stream=True)
    return [event.model_dump(exclude_unset=True) async for event in stream]


async def anthropic_session(client: anthropic.AsyncAnthropic) -> list[tuple[Body, list[Any]]]:
    """Likewise; the likeliest tokens, because there are no seeds."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    trace = []
    for _turn in range(TURNS):
        body = {
            "model": "m",
            "max_tokens": 300,
            "extra_body": {"temperature": 0},
            "messages": list(messages),
            "tools": [{"name": "read", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        events = await ask_anthropic(client, body)
        trace.append((body, events))
        (begun,) = [each for each in events if each["type"] == "content_block_start"]
        told = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        block = begun["content_block"]
        assert (block["type"], block["name"]) == ("tool_use", "read")
        block = {**block, "input": json.loads("".join(each["partial_json"] for each in told))}
        assert set(block["input"]) == {"path"}
        messages.append({"role": "assistant", "content": [block]})
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        messages.append({"role": "user", "content": [result]})
    return trace


@shown_in_parts("multiprocess/test_server_clients.py", "multiprocess/test_structured_answers.py")
def test_a_session_is_the_same_again(peers: list[edge.PeerInfo], agent: Path) -> None:
    """In shape from turn to turn, and word for word when requests with seeds are sent once more."""
    import anthropic
    import openai

    async def main() -> None:
        async with (
            loaded(peers, agent, "solo") as model,
            serving(model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
        ):
            trace = await openai_session(one)
            for _body, chunks in trace:
                assert shape(chunks) == shape(trace[0][1])
            for body, chunks in trace:
                again = await ask_openai(one, body)
                assert (shape(again), said(again)) == (shape(chunks), said(chunks))
            usage = (await one.chat.completions.create(**trace[-1][0])).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert 2 * (usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens
            trace = await responses_session(one)
            for body, events in trace:
                assert shape(events) == shape(trace[0][1])
                again = await ask_responses(one, body)
                assert shape(again) == shape(events)
                assert (
                    again[-1]["response"]["output"][0]["arguments"]
                    == (events[-1]["response"]["output"][0]["arguments"])
                )
            trace = await anthropic_session(other)
            for body, events in trace:
                assert shape(events) == shape(trace[0][1])
                again = await ask_anthropic(other, body)
                assert shape(again) == shape(events)
                assert again[2]["delta"] == events[2]["delta"], "usage tells what was found"
            begun: list[Any] = [*ASKED, {"role": "assistant", "content": "It lives"}]
            told = [
                await other.messages.count_tokens(model="m", messages=each)
                for each in (ASKED, begun)
            ]
            assert 0 < told[1].input_tokens - told[0].input_tokens < 9
            answer = await other.messages.create(model="m", max_tokens=4, messages=begun)
            assert answer.usage.output_tokens

    asyncio.run(main())


def test_an_agent_that_another_one_started_is_answered(
    peers: list[edge.PeerInfo], agent: Path
) -> None:
    """Its requests as Codex sends them: the first one has no message of a user, and the template
    wants one. What came goes back, beside items of other agents."""
    import openai

    told = {"type": "input_text", "text": TASK}
    rules = {"type": "input_text", "text": "Be short."}
    from_lead = {"type": "agent_message", "author": "/lead", "recipient": "/lead/child"}
    first: list[Any] = [
        {"type": "message", "role": "developer", "content": [rules]},
        {**from_lead, "content": [told]},
    ]
    tool = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
    body: Body = {
        "model": "m",
        "instructions": "You are an agent.",
        "tools": [tool],
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "temperature": 0.0,
    }

    async def main() -> None:
        async with (
            loaded(peers, agent, "solo") as model,
            serving(model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            events = await ask_responses(
                client, {**body, "input": first, "tool_choice": "required"}
            )
            assert events[-1]["type"] == "response.completed"
            (call,) = events[-1]["response"]["output"]
            assert (call["type"], call["name"]) == ("function_call", "read")
            second = [
                *first,
                {"type": "agent_reasoning", "text": "Hm."},
                call,
                {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT},
                {**from_lead, "encrypted_content": "gAAA"},
                {**from_lead, "content": [{"type": "input_text", "text": "And now?"}]},
            ]
            more = await ask_responses(client, {**body, "input": second, "max_output_tokens": 5})
            assert more[-1]["type"] in ("response.completed", "response.incomplete")
            usage = [each[-1]["response"]["usage"]["input_tokens"] for each in (events, more)]
            assert usage[1] > usage[0]
            passed_over = [each for each in second if each["type"] != "agent_reasoning"]
            again = await ask_responses(
                client, {**body, "input": passed_over, "max_output_tokens": 5}
            )
            assert said(again[-1]["response"]["usage"])["input_tokens"] == usage[1]

    asyncio.run(main())
