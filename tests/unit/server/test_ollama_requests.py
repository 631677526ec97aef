"""What Ollama's clients send, made into a question, or into what is done without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edge.errors import RequestError
from edge.server.fields import Fields
from edge.server.ollama import chat_question, generate_question, is_to_go
from edge.server.refusals import Refusal
from tests.support.scripted_models import ScriptedModel, Visit, word

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"images": ["iVBO"]}, "images"),
        ({"raw": True, "suffix": "}"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "system": "Be kind."}, "system"),
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal, match=f"{name} is not"):
        generate_question(Fields({"prompt": "a", **body}))


def test_pictures_of_a_message_are_refused() -> None:
    with pytest.raises(Refusal, match=r"messages\[0\].images is not"):
        chat_question(Fields({"messages": [{**HELLO, "images": ["iVBO"]}]}))


def test_what_says_nothing_is_taken() -> None:
    empty: dict[str, Any] = {"images": [], "suffix": "", "template": "", "context": []}
    assert generate_question(Fields({"prompt": "a", "raw": True, "system": "", **empty}))
    assert chat_question(Fields({"messages": [{**HELLO, "images": []}]}))


def test_options_are_read_as_ollama_reads_them() -> None:
    options = {
        "seed": -1,
        "top_p": 0,
        "top_k": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    question = generate_question(Fields({"prompt": "a", "options": options}))
    asked = question.options
    assert asked.seed is None, "another each time"
    assert 0 < asked.top_p < 1e-5, "the likeliest"  # type: ignore[operator]
    assert asked.top_k == 0, "all"
    assert (asked.presence_penalty, asked.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("stays", "goes"),
    [
        *((0, True), (0.0, True), ("0", True), ("0s", True), ("0m", True), ("0.0s", True)),
        *((-1, False), ("5m", False), (None, False), (False, False), ("", False), ("10s", False)),
    ],
)
def test_no_time_to_stay_is_read_in_every_form(stays: object, goes: bool) -> None:
    assert is_to_go(Fields({"keep_alive": stays})) is goes


@pytest.mark.parametrize(
    ("path", "nothing", "said"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
        ("/api/generate", {}, {"response": ""}),
    ],
)
def test_who_asks_nothing_loads_the_model_or_has_it_go(
    path: str, nothing: dict[str, Any], said: dict[str, Any]
) -> None:
    async def main() -> None:
        model = ScriptedModel()
        for more, why in (({}, "load"), ({"keep_alive": 0}, "unload")):
            visit = Visit(model, path, {**nothing, **more})
            await visit.running
            told = json.loads(visit.text)
            assert (told["done"], told["done_reason"]) == (True, why)
            assert said.items() <= told.items()
            await visit.shelf.aclose()
            assert model.is_closed is (why == "unload")
        assert not model.prompts

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_after_an_answer_the_model_goes_where_it_is_not_to_stay(stream: bool) -> None:
    async def main() -> None:
        model = ScriptedModel()
        for stays in ("5m", 0):
            model.says.put_nowait(word("Yes", ends=True))
            body = {"messages": [HELLO], "stream": stream, "keep_alive": stays}
            visit = Visit(model, "/api/chat", body)
            await visit.running
            assert visit.status == 200
            await visit.shelf.aclose()
            assert model.is_closed is (stays == 0)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_question_that_was_refused_leaves_the_model_where_it_is(stream: bool) -> None:
    async def main() -> None:
        model = ScriptedModel()
        model.refuses = RequestError("too long")
        body = {"messages": [HELLO], "stream": stream, "keep_alive": 0}
        visit = Visit(model, "/api/chat", body)
        await visit.running
        assert visit.status == 400
        await visit.shelf.aclose()
        assert not model.is_closed

    asyncio.run(main())
