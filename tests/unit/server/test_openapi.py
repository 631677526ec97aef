"""The document of a server is about what it has, and bodies that it takes are as it says."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from edge.api.async_model import AsyncModel
from edge.server.app import Server
from edge.server.fields import Fields
from edge.server.guard import Guard, Rules
from edge.server.openai_fields import chat_question, completion_question
from edge.server.openapi import document
from edge.server.page_files import page_routes
from edge.server.shelf import Shelf


def test_it_has_what_the_server_has() -> None:
    async def load(_name: str, _whole: bool) -> AsyncModel:
        raise AssertionError("nobody asks")

    guard = Server(Shelf(["m"], load), rules=Rules()).app
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
        if "post" in methods
    }


def test_its_schemas_are_schemas() -> None:
    for schema in schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "is_right"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/completions", {"prompt": [1, 2], "stop": ["a"], "temperature": 0.5}, True),
        ("/v1/completions", {"prompt": "a", "model": "m"}, True),
        ("/v1/completions", {"prompt": ""}, False),
        ("/v1/completions", {"prompt": "a", "top_p": 2}, False),
    ],
)
def test_it_says_what_the_server_takes(path: str, body: dict[str, Any], is_right: bool) -> None:
    question = chat_question if path.endswith("chat/completions") else completion_question
    validator = jsonschema.Draft202012Validator(schemas()[path])
    assert validator.is_valid(body) is is_right
    if is_right:
        question(Fields(body))
    else:
        with pytest.raises(Exception, match=r"messages|prompt|n must|top_p"):
            question(Fields(body))
