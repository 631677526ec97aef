"""What comes of a question: which prompt each answer is to, and what its tokens were for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from edge.api.async_model import AsyncModel
from edge.server.keys import Key
from tests.support.scripted_models import ScriptedModel, Visit, word

KEYS = tuple(Key(text=f"the-key-of-somebody-{each}") for each in "ab")


async def answered(
    model: ScriptedModel, path: str, body: dict[str, Any], keys: Sequence[Key] = ()
) -> dict[str, Any]:
    visit = Visit(model, path, body, keys)
    await visit.running
    told: dict[str, Any] = json.loads(visit.text)
    assert visit.status == 200, told
    return told


def test_each_of_several_prompts_has_its_answers() -> None:
    async def main() -> None:
        model = ScriptedModel()
        for text in ("a", "b", "c", "d"):
            model.says.put_nowait(word(text, ends=True))
        body = {"prompt": ["one", "twenty two"], "n": 2}
        told = await answered(model, "/v1/completions", body)
        assert model.prompts == [[3], [3], [6, 3], [6, 3]]
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
        assert told["usage"]["prompt_tokens"] == 3, "each prompt is counted once"
        assert told["usage"]["completion_tokens"] == 4

    asyncio.run(main())


def test_thoughts_are_counted_and_what_ended_the_answer_is_told() -> None:
    async def main() -> None:
        model = ScriptedModel()
        for text in ("<think>", "Hm", ".", "</think>", "Yes", ", I do"):
            model.says.put_nowait(word(text))
        model.says.put_nowait(replace(word("", ends=True), stopped_by="END"))
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        told = await answered(model, "/v1/chat/completions", body)
        assert told["choices"][0]["message"]["reasoning_content"] == "Hm."
        assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        for text in ("Yes", "."):
            model.says.put_nowait(word(text))
        model.says.put_nowait(replace(word("", ends=True), stopped_by="END"))
        asked = {**body, "max_tokens": 9, "stop_sequences": ["END"]}
        told = await answered(model, "/v1/messages", asked)
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("longest", "why"), [(1, "max_tokens"), (9, "model_context_window_exceeded")]
)
def test_an_answer_that_fills_the_context_says_so(longest: int, why: str) -> None:
    """Claude Code makes the conversation shorter then, and does not ask for longer answers."""

    async def main() -> None:
        model = ScriptedModel()
        model.says.put_nowait(replace(word("Yes"), finish_reason="length"))
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": longest}
        assert (await answered(model, "/v1/messages", body))["stop_reason"] == why

    asyncio.run(main())


def test_what_goes_between_two_texts_is_asked_as_the_model_was_made_for() -> None:
    """Both dialects that have a suffix; the prompt is in the tokens of Qwen Coder."""
    asked = {"prompt": "one ", "suffix": " three"}

    async def main() -> None:
        for path in ("/v1/completions", "/api/generate"):
            model = ScriptedModel()
            visit = Visit(model, path, {**asked, "stream": False})
            await visit.running
            assert visit.status == 400
            assert "suffix is not for this model" in visit.text
            model.tokens = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}
            model.says.put_nowait(word("two", ends=True))
            told = await answered(model, path, {**asked, "stream": False})
            assert "two" in json.dumps(told)
            parts = ("<|fim_prefix|>one", "<|fim_suffix|>", "three<|fim_middle|>")
            assert model.prompts == [list(map(len, parts))]
        visit = Visit(model, "/v1/completions", {**asked, "prompt": [1, 2]})
        await visit.running
        assert "a prompt that is a text" in visit.text

    asyncio.run(main())


CALL = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "read", "parameters": {}}}
ONE: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}


class Told(ScriptedModel):
    """Its template takes tools."""

    def encode_chat(self, messages: Any, **given: Any) -> list[int]:
        return [*super().encode_chat(messages), *map(len, given.get("tools") or ())]


@pytest.mark.parametrize(
    ("offer", "calls"),
    [
        ({"tools": [TOOL]}, 2),
        (ONE, 1),
        ({"tools": [TOOL], "tool_choice": "none"}, 0),
        ({"tools": [{"type": "function", "function": {"name": "write"}}]}, 0),
        ({}, 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_no_more_is_called_than_was_asked_for(
    offer: dict[str, Any], calls: int, logprobs: bool
) -> None:
    """What is no call is text; of calls beyond the only one nothing is told."""

    async def main() -> None:
        model = Told()
        for _twice in range(2):
            for text in (CALL, "\n", CALL):
                model.says.put_nowait(word(text))
            model.says.put_nowait(word("", ends=True))
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": logprobs, **offer}
        (choice,) = (await answered(model, "/v1/chat/completions", body))["choices"]
        message = choice["message"]
        assert len(message.get("tool_calls", ())) == calls
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert message["content"] == (None if calls else f"{CALL}\n{CALL}")
        visit = Visit(model, "/v1/chat/completions", {**body, "stream": True})
        await visit.running
        lines = [each.removeprefix("data: ") for each in visit.text.split("\n\n") if each]
        choices = [json.loads(each)["choices"][0] for each in lines[:-1]]
        assert len(choices) == (2 * calls + 1 if calls else len(choices))
        assert all(choice["delta"] for choice in choices[:-1])
        if logprobs:
            told = [
                token for each in choices for token in (each["logprobs"] or {}).get("content", ())
            ]
            assert len(told) == 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reads", "wanted"),
    [
        ((), []),
        (("tools",), ["tools"]),
        (("enable_thinking",), ["thinking"]),
        (("tools", "thinking"), ["tools", "thinking"]),
    ],
)
def test_what_a_template_takes_is_a_capability(reads: tuple[str, ...], wanted: list[str]) -> None:
    class Reads(ScriptedModel):
        can_chat = True

        def encode_chat(self, messages: Any, **given: Any) -> list[int]:
            given |= given.pop("variables", {})
            told = [len(repr(given.get(name))) for name in reads]
            return [*super().encode_chat(messages), *told]

    async def main() -> Sequence[str]:
        model = Reads()
        visit = Visit(model, "/v1/completions", {})
        await visit.running
        return await visit.server._answers.capabilities(cast(AsyncModel, model))

    found = asyncio.run(main())
    assert found == ["completion", "embedding", *wanted]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c d"}]}),
        ("/v1/completions", {"prompt": "a b c d"}),
        ("/v1/responses", {"input": "a b c d"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a b c d"}], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize(
    ("keys", "salt", "wanted"),
    [
        ((), None, ""),
        ((), "x", "x"),
        (KEYS, None, KEYS[0].client),
        (KEYS, "x", f"{KEYS[0].client}\0x"),
    ],
)
def test_everybody_is_told_what_was_found_of_what_they_may_find(
    path: str, asked: dict[str, Any], keys: Sequence[Key], salt: str | None, wanted: str
) -> None:
    async def main() -> None:
        model = ScriptedModel()
        model.found_tokens = 3
        model.says.put_nowait(word("Yes", ends=True))
        usage = (await answered(model, path, {**asked, "cache_salt": salt}, keys))["usage"]
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details", usage))
        assert details.get("cached_tokens", details.get("cache_read_input_tokens")) == 3
        if path == "/v1/messages":
            assert usage["input_tokens"] == 1
        assert model.salts == [wanted]

    asyncio.run(main())
