"""A client that goes away before its first token is not waited for, nor a prompt by a server that
ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from edge.api.async_model import AsyncModel
from edge.server.app import Server
from edge.server.guard import Rules
from edge.server.model_pool import ModelPool
from edge.text.answer_forms import AnswerForm


class EndlessPrompt:
    """Stands for a model that is busy with a prompt: there is no token until somebody gives up."""

    tokenizer: Any = None
    answer_form = AnswerForm()

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = False
        self.tokenizer = self

    def encode(self, _prompt: str) -> list[int]:
        return [1, 2]

    def stream(self, *_prompt: object, **_options: object) -> EndlessPrompt:
        return self

    async def __aenter__(self) -> EndlessPrompt:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.given_up = True

    def __aiter__(self) -> EndlessPrompt:
        return self

    async def __anext__(self) -> object:
        self.asked.set()
        return await asyncio.Event().wait()


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [],
}


def asked(stream: bool) -> bytes:
    return json.dumps({"model": "m", "prompt": "x", "stream": stream}).encode()


@pytest.mark.parametrize("stream", [True, False])
def test_its_answer_is_given_up(stream: bool) -> None:
    async def main() -> None:
        model = EndlessPrompt()
        server = Server(ModelPool.of(cast(AsyncModel, model), "m"), rules=Rules())
        body = asked(stream)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await model.asked.wait()
            return {"type": "http.disconnect"}

        async def send(_message: object) -> None:
            pass

        async with asyncio.timeout(60):
            await server.app(dict(SCOPE), cast(Any, receive), cast(Any, send))
        assert model.given_up
        assert server.gate.inside == 0

    asyncio.run(main())


def test_who_waits_when_the_server_ends_is_told_to_ask_again() -> None:
    """As uvicorn ends what is under way when it has waited for long enough."""

    async def main() -> list[dict[str, Any]]:
        model = EndlessPrompt()
        server = Server(ModelPool.of(cast(AsyncModel, model), "m"), rules=Rules())
        messages = [{"type": "http.request", "body": asked(False), "more_body": False}]
        told: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, Any]) -> None:
            told.append(message)

        answering = asyncio.ensure_future(
            server.app(dict(SCOPE), cast(Any, receive), cast(Any, send))
        )
        async with asyncio.timeout(60):
            await model.asked.wait()
            answering.cancel()
            await answering
        assert model.given_up
        return told

    start, body = asyncio.run(main())
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    assert json.loads(body["body"])["error"]["type"] == "overloaded_error"
