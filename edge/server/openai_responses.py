"""OpenAI's /v1/responses, without stored responses: reads requests, and writes items."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from edge.answers.text import Token
from edge.server.answers import Begin, End, Happening, Question
from edge.server.bodies import Response
from edge.server.efforts import effort_variables
from edge.server.fields import Fields
from edge.server.history import Message, turns
from edge.server.openai_chat import logprobs_of
from edge.server.openai_fields import LIMITS, options_of, schema_of
from edge.server.openai_items import messages_of, not_stored, updated
from edge.server.refusals import Refusal
from edge.server.response_tools import Origin, named, origins
from edge.server.text_tools import text_given
from edge.server.tools import arguments_text, new_id, openai_tools
from edge.text.answer_parts import ToolCall

Json = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""

_KINDS = {
    "thought": ("rs", "reasoning", "reasoning_text"),
    "said": ("msg", "message", "output_text"),
}
"""Prefix of the id, type of the item, and type of its part."""


def question_of(body: Fields) -> Question:
    """The question of a request, which has the whole conversation."""
    for name in ("previous_response_id", "conversation"):
        if body.raw(name):
            raise not_stored(body, name)
    for name in ("background", "prompt"):
        if body.raw(name):
            raise body.refuse(name, "is not supported: this server stores nothing for later")
    body = updated(body).unlimited(*LIMITS)
    asked = body.shaped(Response)
    form = None if asked.text is None else asked.text.format
    messages: list[Message] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += messages_of(body.objects("input"))
    messages = turns(messages, joins=True)
    if not any(message["role"] == "user" for message in messages):
        raise body.refuse("input", "must have a message of the user")
    wants_logprobs = _LOGPROBS in (asked.include or ())
    offer = openai_tools(named(body), flat=True)
    return Question(
        messages=messages,
        options=options_of(
            body,
            asked,
            most_new_tokens=asked.max_output_tokens,
            logprobs=asked.top_logprobs or 0 if wants_logprobs else None,
            json_schema=schema_of(form, "text.format", flat=True),
        ),
        tools=offer.tools,
        forced=offer.forced,
        several_calls=offer.several,
        cache_salt=asked.cache_salt or "",
        variables=effort_variables(None if asked.reasoning is None else asked.reasoning.effort),
        told_back=_told_back(body, offer.several),
    )


def _told_back(body: Fields, several: bool) -> Json:
    """The fields of the request that the reply repeats, as OpenAI's does."""
    reasoning, text = body.object("reasoning"), body.object("text")
    metadata = body.object("metadata")
    choice = body.raw("tool_choice")
    repeated = ("prompt_cache_key", "safety_identifier", "user")
    return {
        "background": False,
        "top_logprobs": body.raw("top_logprobs") or 0,
        "instructions": body.text("instructions"),
        "metadata": {} if metadata is None else dict(metadata.items()),
        "reasoning": {
            "effort": None,
            "summary": None,
            **({} if reasoning is None else dict(reasoning.items())),
        },
        "service_tier": body.text("service_tier") or "default",
        "text": {
            **({} if text is None else dict(text.items())),
            "format": (text and text.raw("format")) or {"type": "text"},
        },
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.raw("tools") or [],
        "parallel_tool_calls": several,
        **{name: body.text(name) for name in repeated if name in body},
    }


@dataclass(slots=True, kw_only=True)
class ResponsesTranslator:
    """Writes one reply of /v1/responses: items of thoughts, texts and calls."""

    model: str
    question: Question
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _created: float = field(default_factory=time.time)
    _items: list[Json] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)
    _prompt_tokens: int = 0
    _pending: list[Token] = field(default_factory=list)
    """Tokens whose logprobs are sent with the next text."""

    async def whole(self, happenings: AsyncIterator[Happening]) -> Json:
        """The whole reply."""
        response: Json = {}
        async for event in self.events(happenings):
            response = event.get("response", response)
        return response

    async def events(self, happenings: AsyncIterator[Happening]) -> AsyncGenerator[Json]:
        """The events of the stream; `type` is the name of each."""
        async for event in happenings:
            if isinstance(event, Begin):
                self._prompt_tokens = event.prompt_tokens
                for each in self._begin():
                    yield each
            elif isinstance(event, End):
                if self._items and self._items[-1]["type"] == "message":
                    self._items[-1]["content"][0]["logprobs"] += self._logprobs()
                for closing in self._close():
                    yield closing
                status = "incomplete" if event.why == "length" else "completed"
                response = self._response(status, event)
                yield self._event(f"response.{status}", response=response)
            else:
                if self.question.options.logprobs is not None:
                    self._pending += event.tokens
                for which, text in (("thought", event.thought), ("said", event.said)):
                    if text:
                        for each in self._more(which, text):
                            yield each
                for call in event.calls:
                    self._pending.clear()
                    for each in self._call(call):
                        yield each

    def refused(self, refusal: Refusal) -> list[Json]:
        """The whole stream of a question that is refused."""
        return [*self._begin(), self.failed(refusal)]

    def failed(self, refusal: Refusal) -> Json:
        """The last event of an answer that fails."""
        code = refusal.code or ("invalid_prompt" if refusal.status < 500 else "server_error")
        response = self._response("failed")
        response["error"] = {"code": code, "message": refusal.said_in("openai")}
        return self._event("response.failed", response=response)

    def _begin(self) -> list[Json]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def _more(self, which: str, text: str) -> list[Json]:
        events = []
        prefix, kind, part_kind = _KINDS[which]
        if not self._items or self._items[-1]["type"] != kind:
            events += self._close()
            item: Json = {
                "id": f"{prefix}_{uuid.uuid4().hex}",
                "type": kind,
                "status": "in_progress",
            }
            if kind == "reasoning":
                item["summary"] = []
            else:
                item["role"] = "assistant"
            item["content"] = []
            self._items.append(item)
            index = len(self._items) - 1
            added = {**item, "content": []}
            events.append(self._event("response.output_item.added", output_index=index, item=added))
            item["content"].append(_part(part_kind, ""))
            part = _part(part_kind, "")
            events.append(self._of_part("response.content_part.added", part=part))
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs = self._logprobs()  # taken also for thoughts, which are sent without any
        extra: Json = {}
        if part_kind == "output_text":
            part["logprobs"] += logprobs
            extra = {"logprobs": logprobs}
        events.append(self._of_part(f"response.{part_kind}.delta", delta=text, **extra))
        return events

    def _logprobs(self) -> list[Json]:
        found = logprobs_of(self._pending)
        self._pending.clear()
        return found

    def _call(self, call: ToolCall) -> list[Json]:
        """The events of a call, which is one complete item."""
        events = self._close()
        origin = self._origins.get(call.name, Origin(name=call.name))
        given = text_given(call) if origin.takes_text else None
        if given is not None:
            kind, name, prefix, arguments = "custom_tool_call", "input", "ctc", given
            event = "response.custom_tool_call_input"
        else:
            kind, name, prefix, arguments = "function_call", "arguments", "fc", arguments_text(call)
            event = "response.function_call_arguments"
        item: Json = {"id": new_id(prefix), "type": kind, "status": "in_progress"}
        item |= {"call_id": new_id("call"), "name": origin.name, name: ""}
        if origin.namespace is not None:
            item["namespace"] = origin.namespace
        index = len(self._items)
        place = {"item_id": item["id"], "output_index": index}
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        events.append(self._event(f"{event}.delta", **place, delta=arguments))
        events.append(self._event(f"{event}.done", **place, name=origin.name, **{name: arguments}))
        whole = {**item, "status": "completed", name: arguments}
        self._items.append(whole)
        events.append(self._event("response.output_item.done", output_index=index, item=whole))
        return events

    @property
    def _origins(self) -> Mapping[str, Origin]:
        tools = self.question.told_back.get("tools", ())
        assert isinstance(tools, Sequence)
        return origins(tools)

    def _close(self) -> list[Json]:
        """The events that complete the current item, if there is one."""
        if not self._items or self._items[-1]["status"] == "completed":
            return []
        item = self._items[-1]
        (part,) = item["content"]
        item["status"] = "completed"
        extra: Json = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        return [
            self._of_part(f"response.{part['type']}.done", text=part["text"], **extra),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _of_part(self, name: str, **facts: Any) -> Json:
        index = len(self._items) - 1
        item = self._items[index]["id"]
        return self._event(name, item_id=item, output_index=index, content_index=0, **facts)

    def _event(self, kind: str, /, **facts: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **facts}

    def _response(self, status: str, end: End | None = None) -> Json:
        new_tokens, found, thought = 0, 0, 0
        if end is not None:
            new_tokens, found, thought = end.new_tokens, end.found_tokens, end.thought_tokens
        options = self.question.options
        is_cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "max_output_tokens": options.max_new_tokens,
            "model": self.model,
            "output": list(self._items),
            "previous_response_id": None,
            "store": False,
            "temperature": options.temperature,
            **self.question.told_back,
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": found, "cache_write_tokens": 0},
                "output_tokens": new_tokens,
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": self._prompt_tokens + new_tokens,
            },
        }


def _part(kind: str, text: str) -> Json:
    part: Json = {"type": kind, "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})
