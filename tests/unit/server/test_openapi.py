"""The document of a server is about what it has, and bodies that it takes are as it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from edge.api.async_model import AsyncModel
from edge.kernels.sampling.parameters import SamplingParameters
from edge.server import (
    anthropic_messages,
    embeddings,
    ollama,
    openai_fields,
    openai_responses,
    rerank,
)
from edge.server.answers import Question
from edge.server.app import Server
from edge.server.fields import Fields
from edge.server.guard import Guard, Rules
from edge.server.model_pool import ModelPool
from edge.server.openapi import document
from edge.server.page_files import page_routes
from edge.server.refusals import Refusal

HELLO = {"role": "user", "content": "Hello"}
ASKED: dict[str, tuple[Callable[[Fields], object], dict[str, Any]]] = {
    "/v1/chat/completions": (openai_fields.chat_question, {"messages": [HELLO]}),
    "/v1/completions": (openai_fields.completion_question, {"prompt": "a"}),
    "/v1/responses": (openai_responses.question_of, {"input": "a"}),
    "/v1/embeddings": (embeddings.openai_asked, {"input": "a"}),
    "/v1/rerank": (rerank.rerank_asked, {"query": "a", "documents": ["b"]}),
    "/v1/messages": (anthropic_messages.question_of, {"messages": [HELLO], "max_tokens": 1}),
    "/api/chat": (ollama.chat_question, {"messages": [HELLO]}),
    "/api/generate": (ollama.generate_question, {"prompt": "a"}),
    "/api/embed": (embeddings.ollama_asked, {"input": "a"}),
}


def test_it_has_what_the_server_has() -> None:
    async def load(_name: str, _whole: bool) -> AsyncModel:
        raise AssertionError("nobody asks")

    guard = Server(ModelPool(["m"], load), rules=Rules()).app
    assert isinstance(guard, Guard)
    assert isinstance(guard._app, Starlette)
    routes = [each for each in guard._app.routes if isinstance(each, Route)]
    page = {each.path for each in page_routes()}
    served = {
        (each.path.replace("{name:path}", "{name}"), method.lower())
        for each in routes
        for method in each.methods or ()
        if each.path not in page and method != "HEAD"
    }
    described = {
        (path, method) for path, methods in document(["m"])["paths"].items() for method in methods
    }
    assert described == served


def schemas() -> dict[str, Any]:
    """By path, of bodies; each with what it refers to."""
    told = document(["m"])
    return {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        | {"components": told["components"]}
        for path, methods in told["paths"].items()
        if "post" in methods and "application/json" in methods["post"]["requestBody"]["content"]
    }


def test_its_schemas_are_schemas() -> None:
    for schema in schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "is_right"),
    [
        ("/v1/chat/completions", {"messages": [HELLO]}, True),
        ("/v1/chat/completions", {"messages": [HELLO], "n": 0}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/completions", {"prompt": [1, 2], "stop": ["a"], "temperature": 0.5}, True),
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/completions", {"prompt": ""}, False),
        ("/v1/completions", {"prompt": ["a", "b"]}, True),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}, True),
        ("/v1/completions", {"prompt": [[1], []]}, False),
        ("/v1/completions", {"prompt": []}, False),
        ("/v1/completions", {"prompt": ["a"] * 129}, False),
        ("/v1/chat/completions", {"messages": [HELLO], "reasoning_effort": "low"}, True),
        ("/v1/chat/completions", {"messages": [HELLO], "reasoning_effort": "lots"}, False),
        ("/api/chat", {"messages": [HELLO], "think": "high"}, True),
        ("/api/chat", {"messages": [HELLO], "think": 1}, False),
        ("/v1/responses", {"input": "a", "service_tier": "flex"}, True),
        ("/v1/responses", {"input": "a", "service_tier": "first"}, False),
        ("/v1/embeddings", {"input": "a", "priority": "low"}, True),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 1, "priority": "high"}, True),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 1, "priority": 1}, False),
        ("/api/chat", {"messages": [HELLO], "priority": "urgent"}, False),
    ],
)
def test_it_says_what_the_server_takes(path: str, body: dict[str, Any], is_right: bool) -> None:
    validator = jsonschema.Draft202012Validator(schemas()[path])
    assert not validator.is_valid(body), "every body names a model"
    assert validator.is_valid({"model": "m", **body}) is is_right
    assert is_taken(path, body) is is_right


def test_its_limits_of_numbers_are_those_of_the_server() -> None:
    """The least and the most of each is taken, and what is beyond them is refused."""
    tried = 0
    for path, (_ask, body) in ASKED.items():
        whole = schemas()[path]["properties"]
        for within, properties in (("", whole), ("options", _properties(whole, "options"))):
            for name, schema in properties.items():
                for bound, step in (("minimum", -1), ("maximum", 1)):
                    if (limit := schema.get(bound)) is None:
                        continue
                    beyond = limit + step * (1 if schema["type"] == "integer" else 1e-9)
                    for value, is_right in ((limit, True), (beyond, False)):
                        asked = {name: value, **({"logprobs": True} if "top_l" in name else {})}
                        more = {within: asked} if within else asked
                        told = f"{path} {within} {name} {value}"
                        assert is_taken(path, {**body, **more}) is is_right, told
                        tried += 1
    assert tried > 100


def _properties(schema: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = schema.get(name, {}).get("properties", {})
    return found


def is_taken(path: str, body: dict[str, Any]) -> bool:
    try:
        ASKED[path][0](Fields(body))
    except Refusal:
        return False
    return True


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_share_of_nothing_leaves_the_likeliest_token(path: str) -> None:
    ask, body = ASKED[path]
    share = {"top_p": 0}
    question = ask(Fields({**body, **({"options": share} if path == "/api/chat" else share)}))
    assert isinstance(question, Question)
    assert 0 < sampled(question).top_p < 1e-5


@pytest.mark.parametrize("seed", [0, 7, 1 << 53, (1 << 63) - 1, -1, -(1 << 63)])
def test_every_seed_that_openai_takes_is_one(seed: int) -> None:
    """Those of the further answers, too; and those that it may be are told as they are."""
    question = openai_fields.chat_question(Fields({"messages": [HELLO], "seed": seed, "n": 16}))
    chosen = sampled(question).seed
    assert chosen == seed or seed < 0
    replace(sampled(question), seed=chosen + question.answers - 1)


def sampled(question: Question) -> SamplingParameters:
    return question.options.sampling(SamplingParameters())
