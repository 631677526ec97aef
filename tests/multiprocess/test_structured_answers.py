"""Answers that keep to a schema, to a grammar, or must call tools: on real peers, however the model
is cut, and over HTTP with the clients that people have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tokenizers import Tokenizer

import edge
from edge.demos.bundled import MODEL
from edge.errors import RequestError
from edge.server.app import Server
from edge.server.connections import WebServer, web_config
from edge.server.guard import Rules
from edge.server.model_pool import ModelPool
from tests.support.call_templates import random_schema
from tests.support.model_folders import calling_model
from tests.support.plans import bundled_plan

if TYPE_CHECKING:
    import anthropic
    import openai

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "Where does the cat live?"}]
FUNCTIONS = [("weather", SCHEMA), ("answer", {"const": {"is": 42}})]
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS
]


@pytest.fixture(scope="module")
def peers() -> Iterator[list[edge.PeerInfo]]:
    with edge.Cluster.local(peers=2, threads=1) as cluster:
        yield list(cluster.peers)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a template that takes tools."""
    return calling_model(tmp_path_factory.mktemp("caller"))


@contextlib.asynccontextmanager
async def loaded(
    peers: list[edge.PeerInfo], folder: Path, layout: str = "tensor_2"
) -> AsyncIterator[edge.AsyncModel]:
    async with await edge.AsyncCluster.connect(peers) as cluster:
        plan = bundled_plan(layout, devices=[peer.id for peer in cluster.peers])
        async with await cluster.load(folder, dtype="float32", plan=plan, concurrency=8) as model:
            yield model


@contextlib.asynccontextmanager
async def serving(model: edge.AsyncModel) -> AsyncIterator[str]:
    """On a port of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = Server(ModelPool.of(model, "m"), rules=Rules()).app
        server = WebServer(web_config(app, most_connections=64))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def is_valid(schema: dict[str, Any], text: str) -> bool:
    return not [*jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))]


def test_answers_keep_to_their_schemas_and_are_the_same_however_the_model_is_cut(
    peers: list[edge.PeerInfo],
) -> None:
    """At once, beside one that keeps to none; with everything else that chooses tokens."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2},
        {"temperature": 1.0, "top_p": 0.8, "logprobs": 2},
        {"temperature": 0.9, "top_k": 5, "frequency_penalty": 1.0, "logit_bias": {20: 3.0}},
    ]

    async def answers(layout: str) -> list[edge.Reply]:
        async with loaded(peers, MODEL, layout) as model:
            free = model.generate("The cat", max_new_tokens=20, temperature=1, seed=3)
            kept = [
                model.generate(
                    "Once upon a time",
                    json_schema=random_schema(seed, depth=1),
                    seed=seed,
                    max_new_tokens=250,
                    **ways[seed % len(ways)],
                )
                for seed in range(5)
            ]
            tasks = [asyncio.ensure_future(each) for each in (free, *kept)]
            return [await task for task in tasks]

    replies = {layout: asyncio.run(answers(layout)) for layout in ("solo", "tensor_2")}
    replies["pipeline_2"] = asyncio.run(answers("pipeline_2"))
    for reply in replies.values():
        assert [each.token_ids for each in reply] == [each.token_ids for each in replies["solo"]]
    for seed, kept in enumerate(replies["solo"][1:]):
        assert kept.finish_reason == "stop", kept.text
        assert is_valid(random_schema(seed, depth=1), kept.text)


def test_what_cannot_be_is_said_and_others_go_on(peers: list[edge.PeerInfo]) -> None:
    async def main() -> None:
        async with loaded(peers, MODEL) as model:
            other = asyncio.create_task(model.generate("The cat", max_new_tokens=20))
            for wrong, said in (
                ({"json_schema": {"not": {}}}, '"not"'),
                ({"json_schema": [1]}, "must be an object"),
                ({"json_schema": {}, "grammar": "start: /a/"}, "one of them"),
                ({"grammar": "begin: /a/"}, "start"),
                ({"grammar": 5}, "must be a text"),
                ({"json_schema": {}, "ignore_eos": True}, "ignores its end"),
            ):
                with pytest.raises(RequestError, match=said):
                    await model.generate("x", **wrong)
            ambiguous = 'start: "x" a{0,1000} "y"\na: b{0,1000}\nb: /[a-x ]/{0,1000}'
            with pytest.raises(RequestError, match="grammar"):
                await model.generate("x", grammar=ambiguous)
            cut = await model.generate(
                "x", grammar="start: /[a-d]{9}/", stop="b", seed=1, temperature=2.0
            )
            assert cut.finish_reason == "stop"
            assert set(cut.text) <= set("acd")
            assert (await other).statistics["new_tokens"] > 0

    asyncio.run(main())


def test_what_must_be_called_in_a_conversation_is_called(
    peers: list[edge.PeerInfo], caller: Path
) -> None:
    async def main() -> None:
        async with loaded(peers, caller) as model:

            async def calls(tool_choice: str) -> list[tuple[str, Any]]:
                reply = await model.chat(
                    ASKED, tools=OPENAI_TOOLS, tool_choice=tool_choice, max_new_tokens=200
                )
                return [(call.name, call.arguments) for call in reply.tool_calls]

            assert await calls("answer") == [("answer", {"is": 42})]
            (first, *_others) = await calls("required")
            assert first[0] in dict(FUNCTIONS)
            jsonschema.validate(first[1], dict(FUNCTIONS)[first[0]])
            assert not await calls("none")

    asyncio.run(main())


def test_clients_ask_for_forms_and_calls(peers: list[edge.PeerInfo], caller: Path) -> None:
    import anthropic
    import openai

    async def main() -> None:
        async with (
            loaded(peers, caller, "solo") as model,
            serving(model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
        ):
            await ask_openai(client)
            await ask_for_any_object(client, caller)
            await ask_anthropic(other)
            await ask_ollama(other)

    asyncio.run(main())


async def ask_openai(client: openai.AsyncOpenAI) -> None:
    import openai

    usual: dict[str, Any] = {"model": "m", "messages": ASKED, "temperature": 1.0, "seed": 5}
    usual["frequency_penalty"] = 1.0  # or a small model writes a lot of white space
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
    }
    reply = await client.chat.completions.create(**usual, response_format=form, n=2)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert is_valid(SCHEMA, choice.message.content or "")
    stream = await client.chat.completions.create(
        **usual, response_format=form, stream=True, extra_body={"min_tokens": 3}
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == reply.choices[0].message.content
    named = {"type": "function", "function": {"name": "answer"}}
    choices: tuple[Any, ...] = ("required", named)
    for choice in choices:
        reply = await client.chat.completions.create(
            **usual, tools=OPENAI_TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        (told,) = reply.choices
        calls = told.message.tool_calls or []
        assert (told.finish_reason, len(calls)) == ("tool_calls", 1)
        for call in calls:
            assert call.type == "function"
            assert is_valid(dict(FUNCTIONS)[call.function.name], call.function.arguments)
            assert choice == "required" or call.function.name == "answer"
    digits: Any = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a[0-9]{2,3}"}}
    custom: Any = {"type": "custom", "custom": {"name": "dial", "format": digits}}
    dial: Any = {"type": "custom", "custom": {"name": "dial"}}
    reply = await client.chat.completions.create(**usual, tools=[custom], tool_choice=dial)
    (made,) = reply.choices[0].message.tool_calls or []
    assert made.type == "custom"
    assert re.fullmatch("a[0-9]{2,3}", made.custom.input)
    reply = await client.chat.completions.create(
        **usual, tools=OPENAI_TOOLS, response_format=form, parallel_tool_calls=False
    )
    message = reply.choices[0].message
    assert message.tool_calls or is_valid(SCHEMA, message.content or "")

    flat: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    response = await client.responses.create(
        model="m", input="Where?", text={"format": flat}, temperature=1.0
    )
    assert is_valid(SCHEMA, response.output_text)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in FUNCTIONS
    ]
    response = await client.responses.create(
        model="m",
        input="Where?",
        tools=tools,
        tool_choice={"type": "function", "name": "answer"},
        temperature=1.0,
    )
    assert [item.type for item in response.output] == ["function_call"]

    refused: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ]
    unsupported = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    refused.append(
        ({"response_format": {"type": "json_schema", "json_schema": unsupported}}, "uniqueItems")
    )
    for wrong, said in refused:
        for stream_it in (False, True):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.chat.completions.create(**usual, **wrong, stream=stream_it)


async def ask_for_any_object(client: openai.AsyncOpenAI, caller: Path) -> None:
    """One that is whole, of a model that would say something else: nothing but its last token."""
    closing = Tokenizer.from_file(str(caller / "tokenizer.json")).token_to_id("}")
    usual: Any = {"model": "m", "messages": ASKED, "temperature": 0.0, "max_tokens": 20}
    usual["logit_bias"] = {str(closing): 100}
    reply = await client.chat.completions.create(**usual)
    assert (reply.choices[0].message.content or "").startswith("}}")
    reply = await client.chat.completions.create(**usual, response_format={"type": "json_object"})
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content or "") == {}


async def ask_anthropic(client: anthropic.AsyncAnthropic) -> None:
    tools: list[Any] = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS]
    one = {"disable_parallel_tool_use": True}
    choices: list[Any] = [{"type": "any", **one}, {"type": "tool", "name": "weather", **one}]
    for choice in choices:
        message = await client.messages.create(
            model="m",
            max_tokens=400,
            messages=ASKED,
            tools=tools,
            tool_choice=choice,
            extra_body={"temperature": 1.0},
        )
        assert message.stop_reason == "tool_use"
        for block in message.content:
            assert block.type == "tool_use"
            assert is_valid(dict(FUNCTIONS)[block.name], json.dumps(block.input))
            assert block.name == choice.get("name", block.name)


async def ask_ollama(client: anthropic.AsyncAnthropic) -> None:
    """Its official client is no dependency of the tests; another one's posts will do."""
    import anthropic

    body = {"model": "m", "messages": ASKED, "stream": False, "options": {"temperature": 1.0}}
    told = await client.post("/api/chat", cast_to=object, body={**body, "format": SCHEMA})
    assert isinstance(told, dict)
    assert is_valid(SCHEMA, told["message"]["content"])
    with pytest.raises(anthropic.BadRequestError, match="format"):
        await client.post("/api/chat", cast_to=object, body={**body, "format": "xml"})
