"""What Ollama's clients send, made into a question, or into what is done without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edge.errors import RequestError
from edge.server.fields import Fields
from edge.server.ollama import Stay, chat_question, generate_question, stay_of
from edge.server.refusals import Refusal
from tests.support.scripted_models import ScriptedModel, Visit, word

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"images": ["iVBO"], "raw": True}, "images"),
        ({"raw": True, "suffix": "}"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "system": "Be kind."}, "system"),
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal, match=f"{name} is not"):
        generate_question(Fields({"prompt": "a", **body}))


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
    ("said", "stay"),
    [
        *((each, Stay(0.0)) for each in (0, 0.0, "0", "0s", "0m", "0.0s", "-0s", "0h0m")),
        *((each, Stay(None)) for each in (-1, -0.5, "-1", "-1s", "-1h30m", 1e300, "99999999h")),
        *((each, Stay(300.0)) for each in (300, 300.0, "5m", "300s", "+4m60s", "300000ms")),
        *((("1h30m", Stay(5400.0))), ("1.5h", Stay(5400.0)), (0.25, Stay(0.25))),
        *((None, None), ("", None)),
    ],
)
def test_how_long_a_model_stays_is_read_as_go_writes_times(said: object, stay: Stay | None) -> None:
    assert stay_of(Fields({"keep_alive": said})) == stay


@pytest.mark.parametrize(
    "said", ["soon", "5", "5 m", "m", "5m!", "1", "--1s", True, [], "9" * 400 + "s"]
)
def test_what_is_no_time_is_refused(said: object) -> None:
    with pytest.raises(Refusal, match="keep_alive must be seconds, or a time"):
        stay_of(Fields({"keep_alive": said}))


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
            await visit.pool.aclose()
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
            assert visit.pool.stays_s("m") == pytest.approx(300 if stays else 0, abs=60)
            await visit.pool.aclose()
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
        await visit.pool.aclose()
        assert not model.is_closed

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value", "neutral"), [("mirostat", 2, 0), ("typical_p", 0.7, 1.0), ("tfs_z", 0.5, 1)]
)
def test_options_that_would_change_the_answer_are_refused(
    name: str, value: object, neutral: object
) -> None:
    for read, body in (
        (chat_question, {"messages": [{"role": "user", "content": "x"}]}),
        (generate_question, {"prompt": "x"}),
    ):
        read(Fields({**body, "options": {name: neutral, "num_ctx": 4096}}))
        with pytest.raises(Refusal, match=f"options.{name} is not supported by this server"):
            read(Fields({**body, "options": {name: value}}))
