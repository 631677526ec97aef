"""Ollama's /api/chat and /api/generate: reads requests, and writes replies as lines."""

from __future__ import annotations

import datetime
import hashlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from edge.answers.terms import GenerationOptions
from edge.server.answers import Begin, End, Happening, Question
from edge.server.bodies import OllamaBody, OllamaChat, OllamaGenerate, OllamaOptions
from edge.server.efforts import effort_variables, switched
from edge.server.fields import Fields
from edge.server.history import Message, turns
from edge.server.openai_fields import count_of, message_of, refuse_elsewhere, share_of
from edge.server.pictures import Content, as_parts, picture_of_base64
from edge.server.priorities import priority_of
from edge.server.tools import openai_tools

Json = dict[str, Any]

_FAMILY = "edge"
"""The prefix of the names under which clients look for facts."""

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"(\d{{1,9}}(?:\.\d{{0,9}})?)({'|'.join(_UNITS_S)})")
_LONGEST_STAY_S = 1e9
"""Seconds that count as for ever."""

_INSTEAD = {
    "template": "the model's own template is used, and none for a raw prompt",
    "context": "send the conversation as messages to /api/chat",
}
"""What to do instead of a field that is not supported."""

VERSION = "0.12.0"
"""Version of Ollama's API that is served; clients ask for it."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a model stays without users; None: until another needs its memory."""

    seconds: float | None


def stay_of(body: Fields) -> Stay | None:
    """The value of `keep_alive`, if there is one: seconds, or a Go duration such as 1h30m; below 0:
    no limit. Raises Refusal for other values."""
    said = body.raw("keep_alive")
    if said is None or said == "":
        return None
    if type(said) in {int, float}:
        seconds = float(max(-1, min(said, _LONGEST_STAY_S)))
    elif isinstance(said, str) and (read := _read_time(said)) is not None:
        seconds = read
    else:
        raise body.refuse("keep_alive", "must be seconds, or a time as 5m or 1h30m; -1: for ever")
    return Stay(None if seconds < 0 or seconds >= _LONGEST_STAY_S else seconds)


def _read_time(text: str) -> float | None:
    if text in {"-1", "0"}:  # these mean the same in any unit
        return float(text)
    sign = -1 if text.startswith("-") else 1
    digits = text[1:] if text[:1] in {"+", "-"} else text
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        return None
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def asks_nothing(body: Fields, *, chat: bool) -> bool:
    """Whether a request has no question, and only loads or unloads a model."""
    return not (body.objects("messages") if chat else body.text("prompt"))


def chat_question(body: Fields) -> Question:
    asked = body.shaped(OllamaChat)
    _refuse_options(body)
    messages = turns([_message_of(each) for each in body.objects("messages")])
    offer = openai_tools(body)
    return Question(
        messages=messages,
        options=replace(_options(asked), context=asked.context or ()),
        tools=offer.tools,
        forced=offer.forced,
        several_calls=offer.several,
        cache_salt=asked.cache_salt or "",
        variables=_variables(asked),
    )


def generate_question(body: Fields) -> Question:
    """The question in the fields of /api/generate. With `raw` the model continues the prompt; else
    the prompt is a user's message."""
    _refuse(body, "template", "context")
    asked = body.shaped(OllamaGenerate)
    _refuse_options(body)
    prompt = asked.prompt
    if prompt is None:
        raise body.refuse("prompt", "is missing")
    if asked.raw:
        for name in ("system", "suffix", "images"):
            if body.raw(name):
                raise body.refuse(name, "is not for a raw prompt; put it into the prompt")
    if asked.raw or asked.suffix:
        return Question(
            prompts=[prompt],
            suffix=asked.suffix or "",
            options=_options(asked),
            cache_salt=asked.cache_salt or "",
        )
    messages: list[Message] = []
    if asked.system:
        messages.append({"role": "system", "content": asked.system})
    messages.append({"role": "user", "content": _with_pictures(body, prompt)})
    return Question(
        messages=messages,
        options=_options(asked),
        cache_salt=asked.cache_salt or "",
        variables=_variables(asked),
    )


def _message_of(message: Fields) -> Message:
    found = message_of(message)
    if message.raw("images") and found["role"] not in ("user", "tool"):
        raise message.refuse("images", "is for messages of the user, and of tools")
    return {**found, "content": _with_pictures(message, cast(Content, found["content"]))}


def _with_pictures(body: Fields, content: Content) -> Content:
    """The content behind the pictures in `images`, texts in base64."""
    images = body.raw("images") or []
    if not isinstance(images, list):
        raise body.refuse("images", "must be a list of texts in base64")
    if not images:
        return content
    return [*(picture_of_base64(body, "images", each) for each in images), *as_parts(content)]


def _variables(asked: OllamaBody) -> dict[str, object]:
    """Template variables for `think`: on, off, or an effort."""
    if isinstance(asked.think, bool):
        return switched(asked.think)
    return effort_variables(asked.think)


def _refuse(body: Fields, *names: str) -> None:
    """Refuse fields that would change the answer and are not supported."""
    for name in names:
        if body.raw(name) not in (None, "", []):
            raise body.refuse(name, f"is not supported by this server; {_INSTEAD[name]}")


def _refuse_options(body: Fields) -> None:
    if (options := body.object("options")) is not None:
        refuse_elsewhere(options)


def _options(asked: OllamaBody) -> GenerationOptions:
    options = asked.options or OllamaOptions()
    longest = options.num_predict
    return GenerationOptions(
        max_new_tokens=longest if longest is not None and longest > 0 else None,
        temperature=options.temperature,
        top_p=share_of(options.top_p),
        top_k=count_of(options.top_k),
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        stop=options.stop or (),
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        seed=None if options.seed == -1 else options.seed,
        json_schema="object" if asked.format == "json" else asked.format or None,
        priority=priority_of(asked.priority),
        speculate=asked.speculate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a loaded model."""

    dtype: str
    weight_bytes: int
    context_tokens: int
    hidden_size: int
    capabilities: Sequence[str]


def described(name: str, created: int, facts: Facts | None) -> Json:
    """An entry of /api/tags. Its digest is made from the name, because clients tell models apart
    by it."""
    made = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    return {
        "name": name,
        "model": name,
        "modified_at": made,
        "size": 0 if facts is None else facts.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(facts),
    }


def _details(facts: Facts | None) -> Json:
    return {
        "parent_model": "",
        "format": "edge",
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": "" if facts is None else facts.dtype,
    }


def shown(created: int, facts: Facts) -> Json:
    """The reply of /api/show."""
    made = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(facts),
        "model_info": {
            "general.architecture": _FAMILY,
            f"{_FAMILY}.context_length": facts.context_tokens,
            f"{_FAMILY}.embedding_length": facts.hidden_size,
        },
        "capabilities": list(facts.capabilities),
        "modified_at": made,
    }


def nothing_said(name: str, why: Literal["load", "unload"], *, chat: bool) -> Json:
    """The reply to a request that only loads or unloads a model."""
    return {**OllamaTranslator(model=name, chat=chat).nothing(), "done": True, "done_reason": why}


def running(name: str, created: int, facts: Facts | None, stays_s: float | None) -> Json:
    """An entry of /api/ps. stays_s: seconds from now; None: no limit, written as a far date."""
    now = datetime.datetime.now(datetime.UTC)
    stays = datetime.timedelta(days=36500) if stays_s is None else datetime.timedelta(0, stays_s)
    found = described(name, created, facts)
    length = {} if facts is None else {"context_length": facts.context_tokens}
    return {**found, **length, "expires_at": (now + stays).isoformat()}


@dataclass(slots=True, kw_only=True)
class OllamaTranslator:
    """Writes one reply of Ollama's API. Durations are in nanoseconds."""

    model: str
    chat: bool
    _began_s: float = field(default_factory=time.perf_counter)
    _prompt_tokens: int = 0

    async def whole(self, happenings: AsyncIterator[Happening]) -> Json:
        """The whole reply, as its last line with all of its text."""
        thought = said = ""
        calls: list[Json] = []
        line: Json = {}
        async for line in self.lines(happenings):
            words = line["message"] if self.chat else line
            thought += words.get("thinking", "")
            said += words["content" if self.chat else "response"]
            calls += words.get("tool_calls", [])
        return {**line, **self._words(thought, said, calls)}

    async def lines(self, happenings: AsyncIterator[Happening]) -> AsyncGenerator[Json]:
        """The lines of the reply, as the events come."""
        async for event in happenings:
            if isinstance(event, Begin):
                self._prompt_tokens = event.prompt_tokens
            elif isinstance(event, End):
                # Clients divide all tokens by it, so the first token needs its share of the time.
                decode_s = event.decode_s * event.new_tokens / max(1, event.new_tokens - 1)
                yield {
                    **self._line("", ""),
                    "done": True,
                    "done_reason": event.why,
                    "total_duration": round(1e9 * (time.perf_counter() - self._began_s)),
                    "load_duration": 0,
                    "prompt_eval_count": self._prompt_tokens,
                    "prompt_eval_duration": round(1e9 * event.first_token_s),
                    "eval_count": event.new_tokens,
                    "eval_duration": round(1e9 * decode_s),
                }
            else:
                calls = [
                    {"function": {"name": call.name, "arguments": dict(call.arguments)}}
                    for call in event.calls
                ]
                yield {**self._line(event.thought, event.said, calls), "done": False}

    def nothing(self) -> Json:
        """A line without text."""
        return {**self._line("", ""), "done": False}

    def _line(self, thought: str, said: str, calls: Sequence[Json] = ()) -> Json:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return {"model": self.model, "created_at": now, **self._words(thought, said, calls)}

    def _words(self, thought: str, said: str, calls: Sequence[Json] = ()) -> Json:
        thinking: Json = {"thinking": thought} if thought else {}
        if self.chat:
            made: Json = {"tool_calls": list(calls)} if calls else {}
            return {"message": {"role": "assistant", "content": said, **thinking, **made}}
        return {"response": said, **thinking}
