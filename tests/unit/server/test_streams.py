"""Streamed answers: the head comes at once, signs of life while nothing is said, and what clients
are told of an answer that cannot be finished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from edge.errors import PeerError, PromptLengthError
from edge.server.streams import SILENCE_S
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.processes import PATIENCE_S
from tests.support.scripted_models import ScriptedModel, Visit, word

HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello", "raw": True},
}


GONE = "peer attic: has gone"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it changes in this loop
            await asyncio.sleep(0)


def data(text: str) -> list[Any]:
    """Of events, or of lines of JSON."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("path", ASKED)
def test_life_is_shown_while_nothing_is_said(path: str) -> None:
    async def main() -> None:
        model = ScriptedModel()
        visit = Visit(model, path, {**ASKED[path], "stream": True})
        await until(lambda: visit.sent)
        assert visit.status == 200, "before there is a token"

        def is_more_than(text: str) -> bool:
            return visit.text != text

        for _ in range(2):
            before = visit.text
            await until(lambda: somebody_waits_for(SILENCE_S))
            let_pass(SILENCE_S)
            await until(partial(is_more_than, before))
            sign = visit.text.removeprefix(before)
            if path.startswith("/api/"):
                (told,) = data(sign)
                assert told.get("message", {"content": told.get("response")})["content"] == ""
                assert told["done"] is False
            else:
                assert sign == (
                    'event: ping\ndata: {"type": "ping"}\n\n'
                    if path == "/v1/messages"
                    else ": waiting\n\n"
                )
        before = visit.text
        await until(lambda: somebody_waits_for(SILENCE_S))
        let_pass(0.6 * SILENCE_S)
        model.says.put_nowait(word("Yes"))
        await until(lambda: visit.text != before)
        before = visit.text
        let_pass(0.6 * SILENCE_S)
        for _ in range(20):
            await asyncio.sleep(0)
        assert visit.text == before, "something came meanwhile"
        model.says.put_nowait(word(".", ends=True))
        await visit.running
        assert not visit.sent[-1]["more_body"]
        said = visit.text.removeprefix(before)
        assert "waiting" not in said
        assert "ping" not in said
        assert model.under_way == 0

    asyncio.run(main())


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_that_cannot_be_finished_says_so(path: str) -> None:
    async def main() -> None:
        model = ScriptedModel()
        visit = Visit(model, path, {**ASKED[path], "stream": True})
        model.says.put_nowait(word("Yes"))
        model.says.put_nowait(PeerError("attic", "has gone"))
        await visit.running
        last = data(visit.text)[-1]
        if path == "/v1/responses":
            names = [line for line in visit.text.splitlines() if line.startswith("event: ")]
            assert names[-1] == "event: response.failed"
            response = last["response"]
            assert (last["type"], response["status"]) == ("response.failed", "failed")
            assert response["error"] == {"code": "server_error", "message": GONE}
            assert last["sequence_number"] == len(names) - 1
            assert response["output"][0]["content"][0]["text"] == "Yes"
        elif path == "/v1/messages":
            assert last["error"] == {"type": "overloaded_error", "message": GONE}
        elif path.startswith("/api/"):
            assert last == {"error": GONE}
        else:
            assert last["error"]["message"] == GONE
            assert "[DONE]" not in visit.text
        assert model.under_way == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ASKED)
def test_agents_are_told_in_their_words_that_a_prompt_is_too_long(path: str, stream: bool) -> None:
    """By these they know that they must make the conversation shorter, and not give up."""
    why = "the prompt has 90 tokens and the context 64; shorten it"

    async def main() -> None:
        model = ScriptedModel()
        model.refuses = PromptLengthError(why, prompt_tokens=90, context_tokens=64)
        visit = Visit(model, path, {**ASKED[path], "stream": stream})
        await visit.running
        (*_, told) = data(visit.text)
        if path == "/v1/responses" and stream:
            assert visit.status == 200
            assert [event["type"] for event in data(visit.text)] == [
                *("response.created", "response.in_progress", "response.failed")
            ]
            told = told["response"]
        else:
            assert visit.status == 400
        if path == "/v1/messages":
            said = "prompt is too long: 90 tokens > 64 maximum"
            assert told["error"] == {"type": "invalid_request_error", "message": said}
        elif path.startswith("/api/"):
            assert told == {"error": why}
        else:
            assert told["error"]["code"] == "context_length_exceeded"
            assert told["error"]["message"] == (
                "This model's maximum context length is 64 tokens. However, your messages "
                "resulted in 90 tokens. Please reduce the length of the messages."
            )
        assert model.under_way == visit.server.gate.inside == 0

    asyncio.run(main())


def test_who_leaves_a_stream_is_not_answered_any_more() -> None:
    async def main() -> None:
        model = ScriptedModel()
        visit = Visit(model, "/v1/completions", {"prompt": "x", "stream": True, "n": 2})
        await until(lambda: visit.sent)
        assert model.under_way == 2
        visit.gone.set()
        await visit.running
        assert model.under_way == visit.server.gate.inside == 0

    asyncio.run(main())
