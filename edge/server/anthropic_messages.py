"""Anthropic's /v1/messages: reads requests, and writes replies and their events."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edge.answers.terms import GenerationOptions
from edge.pictures.messages import NOT_SEEN
from edge.server.answers import Begin, End, Happening, Question
from edge.server.anthropic_tools import TOOL_CHANGES, offered
from edge.server.bodies import AnthropicMessages, CountedMessages, Form
from edge.server.efforts import effort_variables, switched
from edge.server.fields import Fields
from edge.server.history import Message, turns
from edge.server.openai_fields import count_of, schema_of, share_of
from edge.server.pictures import (
    Content,
    Part,
    as_parts,
    picture_of_base64,
    picture_of_url,
    seen_or_said,
)
from edge.server.priorities import priority_of
from edge.server.refusals import Refusal
from edge.server.tools import arguments_text, called, new_id

Json = dict[str, Any]

PING: Json = {"type": "ping"}
"""The keep-alive event of this API; clients ignore it."""

_BILLS = "x-anthropic-billing-header:"

_REFUSED = {
    "mcp_servers": "this server runs no tools; give tools",
    "container": "this server runs no tools and no containers; leave it out",
    "compaction": "this server makes no summaries; ask for one in a message of the user",
    "thread": "this server stores no conversations; send all of its messages",
}
"""Fields of a request that are refused, and what to do instead."""


def question_of(body: Fields, *, counts_only: bool = False) -> Question:
    """The question of a request. counts_only: the request is to /v1/messages/count_tokens, which
    has no fields about the answer."""
    asked = body.shaped(CountedMessages if counts_only else AnthropicMessages)
    for name, instead in _REFUSED.items():
        if body.raw(name) and not (counts_only and name == "compaction"):
            raise body.refuse(name, f"is not supported: {instead}")
    messages: list[Message] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": _system(body)})
    sent = body.objects("messages")
    last_of_user = max((i for i, each in enumerate(sent) if each.raw("role") == "user"), default=0)
    for i, message in enumerate(sent):
        if i > last_of_user or message.raw("clear_at") != "next_user_message":
            messages += _messages(message)
    messages = turns(messages, joins=True)
    if not any(message["role"] == "user" for message in messages):
        raise body.refuse("messages", "must have a message of the user")
    offer = offered(body)
    form, where = _form(asked)
    return Question(
        messages=messages,
        options=GenerationOptions(
            max_new_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=share_of(asked.top_p),
            top_k=count_of(asked.top_k),
            stop=asked.stop_sequences or (),
            json_schema=schema_of(form, where, flat=True),
            priority=priority_of(asked.priority),
            speculate=asked.speculate,
            context=asked.context or (),
        ),
        tools=offer.tools,
        forced=offer.forced,
        several_calls=offer.several,
        cache_salt=asked.cache_salt or "",
        variables=_variables(asked),
    )


def _form(asked: CountedMessages) -> tuple[Form | None, str]:
    """The form of an answer, and the place of the field: `output_config`, or the older
    `output_format`. A request may have an effort in the first and the form in the second."""
    if asked.output_config is not None and asked.output_config.format is not None:
        return asked.output_config.format, "output_config.format"
    return asked.output_format, "output_format"


def _variables(asked: CountedMessages) -> dict[str, object]:
    """Template variables for `thinking`, and for the effort of the last message or of the request.
    Without either, the model does not think, as in Anthropic's API."""
    found: dict[str, object] = {}
    for config in (asked.output_config, asked.messages[-1].output_config):
        found |= effort_variables(None if config is None else config.effort)
    if asked.thinking is not None:
        return found | switched(asked.thinking.type != "disabled")
    return found or switched(False)


def _system(body: Fields) -> str:
    """The system prompt without Claude Code's billing header, which differs in each request and
    would keep the prefix cache from matching."""
    content = body.raw("system")
    if not isinstance(content, list):
        return _text(body, "system")
    parts = body.objects("system")
    return _joined([each for each in parts if not (each.text("text") or "").startswith(_BILLS)])


def _messages(message: Fields) -> list[Message]:
    """The template's messages for one of Anthropic's. Each tool result becomes a message."""
    role = message.need_text("role")
    if isinstance(message.raw("content"), str):
        return [{"role": role, "content": message.raw("content")}]
    found: list[Message] = []
    calls, others = [], []
    thoughts: list[str] = []
    for part in message.objects("content"):
        kind = part.text("type")
        if kind == "tool_use":
            name, arguments = part.need_text("name"), part.raw("input")
            calls.append(called(name, arguments or {}, part.text("id")))
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": part.need_text("tool_use_id")}
            found.append({**result, "content": _result(part)})
        elif kind == "thinking":
            thoughts.append(part.text("thinking") or "")
        elif not _is_passed_over(kind or ""):
            others.append(part)
    if role == "system" and not others:
        return found  # it only changes tools or the effort
    content = _seen(others) if role == "user" else _joined(others)
    whole: dict[str, object] = {"role": role, "content": content}
    if any(thoughts):
        whole["reasoning_content"] = "".join(thoughts)
    if calls:
        whole["tool_calls"] = calls
    if whole["content"] or len(whole) > 2 or not found:
        found.append(whole)
    return found


def _is_passed_over(kind: str) -> bool:
    """Whether a block is ignored: redacted thoughts, tools that a service ran or listed, changes
    of the model, and changes of the tools, which `anthropic_tools` reads."""
    ends = ("_tool_use", "_tool_result")
    return kind in _PASSED_OVER or kind in TOOL_CHANGES or kind.endswith(ends)


_PASSED_OVER = frozenset(("redacted_thinking", "mcp_tool_listing", "fallback"))


def _text(message: Fields, name: str) -> str:
    content = message.raw(name)
    return content if isinstance(content, str) else _joined(_listed(message, name))


def _listed(message: Fields, name: str) -> Sequence[Fields]:
    if not isinstance(message.raw(name), list):
        raise message.refuse(name, "is missing")
    return message.objects(name)


def _joined(parts: Sequence[Fields], *, of_tool: bool = False) -> str:
    return "".join(_words(part, of_tool=of_tool) for part in parts)


def _result(part: Fields) -> Content:
    """The content of a tool's result."""
    error = "Error: " if part.flag("is_error") else ""
    content = part.raw("content") if "content" in part else ""
    if isinstance(content, str):
        return error + content
    found = _seen(_listed(part, "content"), of_tool=True)
    if isinstance(found, str):
        return error + found
    return [*as_parts(error), *found] if error else found


def _seen(parts: Sequence[Fields], *, of_tool: bool = False) -> Content:
    """The content of a user's message or of a tool's result: a text, or parts if there is a
    picture."""
    if not any(part.raw("type") == "image" for part in parts):
        return _joined(parts, of_tool=of_tool)
    read = partial(seen_or_said, read=_picture) if of_tool else _picture
    return [
        read(part)
        if part.raw("type") == "image"
        else {"type": "text", "text": _words(part, of_tool=of_tool)}
        for part in parts
    ]


def _picture(part: Fields) -> Part:
    source = part.object("source")
    if source is None:
        raise part.refuse("source", "is missing")
    kind = source.need_text("type")
    if kind == "base64":
        return picture_of_base64(source, "data", source.raw("data"))
    if kind == "url":
        return picture_of_url(source, "url", source.text("url"))
    raise source.refuse("type", f"is {kind!r:.40}; give the image as base64")


def _words(part: Fields, *, of_tool: bool) -> str:
    """The text of a part. of_tool: the part is a tool's result. Its documents are not refused,
    because an agent would stop; the model is told that it cannot see them."""
    kind = part.need_text("type")
    if kind == "tool_reference":
        return f"There is a tool {part.need_text('tool_name')}."
    if kind == "browser_state":
        return json.dumps(part.raw("tabs") or [], ensure_ascii=False)
    if kind == "compaction":
        return part.text("content") or ""
    if kind == "search_result":
        return _under(part.text("title"), part.text("source"), _plain(part))
    source = part.object("source") if kind == "document" else None
    if source is not None and source.text("type") in {"text", "content"}:
        text = source.text("data") if "data" in source else _plain(source)
        return _under(part.text("title"), part.text("context"), text)
    if of_tool and kind == "document":
        return NOT_SEEN
    return _said(part)


def _plain(part: Fields) -> str:
    """The text of a part that may hold only texts."""
    content = part.raw("content")
    return content if isinstance(content, str) else "".join(map(_said, part.objects("content")))


def _said(part: Fields) -> str:
    kind = part.need_text("type")
    if kind != "text":
        raise part.refuse("type", f"is {kind!r:.40}; only text, images and tools are read")
    return part.text("text") or ""


def _under(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text) + "\n"


def described(name: str, created: int, context_tokens: int | None) -> Json:
    """An entry of /v1/models. An answer may fill the context that the prompt leaves."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": context_tokens,
    }


def page_of(models: Sequence[Json]) -> Json:
    """One page with all models."""
    ids = [each["id"] for each in models]
    return {"data": list(models), "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


@dataclass(slots=True, kw_only=True)
class MessagesTranslator:
    """Writes one reply of Anthropic's API: blocks of thoughts, text and calls, in turn."""

    model: str
    longest: int | None = None
    """The request's max_tokens. An answer that is cut earlier has filled the context."""
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _blocks: list[Json] = field(default_factory=list)

    async def whole(self, happenings: AsyncIterator[Happening]) -> Json:
        """The whole reply."""
        message: Json = {}
        async for event in self.events(happenings):
            if event["type"] == "message_start":
                message = event["message"]
            elif event["type"] == "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
        message["content"] = self._blocks
        return message

    async def events(self, happenings: AsyncIterator[Happening]) -> AsyncGenerator[Json]:
        """The events of the stream; `type` is the name of each."""
        prompt_tokens = 0
        async for event in happenings:
            if isinstance(event, Begin):
                prompt_tokens = event.prompt_tokens
                yield {"type": "message_start", "message": self._begin(event.prompt_tokens)}
                yield PING
                continue
            if isinstance(event, End):
                if self._blocks:
                    yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
                why = "end_turn"
                if event.why == "length":
                    is_asked = self.longest is None or event.new_tokens >= self.longest
                    why = "max_tokens" if is_asked else "model_context_window_exceeded"
                if event.calls and event.why == "stop":
                    why = "tool_use"
                elif event.stopped_by is not None:
                    why = "stop_sequence"
                yield {
                    "type": "message_delta",
                    "delta": {"stop_reason": why, "stop_sequence": event.stopped_by},
                    "usage": {
                        "input_tokens": prompt_tokens - event.found_tokens,
                        "cache_read_input_tokens": event.found_tokens,
                        "output_tokens": event.new_tokens,
                    },
                }
                yield {"type": "message_stop"}
                continue
            for kind, name, text in (
                ("thinking", "thinking_delta", event.thought),
                ("text", "text_delta", event.said),
            ):
                if not text:
                    continue
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    if self._blocks:
                        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
                    block = {"type": kind, kind: ""}
                    if kind == "thinking":
                        block["signature"] = ""
                    self._blocks.append(block)
                    index = len(self._blocks) - 1
                    begun = dict(block)
                    yield {"type": "content_block_start", "index": index, "content_block": begun}
                self._blocks[-1][kind] += text
                yield {
                    "type": "content_block_delta",
                    "index": len(self._blocks) - 1,
                    "delta": {"type": name, kind: text},
                }
            for call in event.calls:
                if self._blocks:
                    yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
                made: Json = {"type": "tool_use", "id": new_id("toolu"), "name": call.name}
                self._blocks.append({**made, "input": dict(call.arguments)})
                index = len(self._blocks) - 1
                empty = {**made, "input": {}}
                yield {"type": "content_block_start", "index": index, "content_block": empty}
                yield {
                    "type": "content_block_delta",
                    "index": index,
                    "delta": {"type": "input_json_delta", "partial_json": arguments_text(call)},
                }

    def failed(self, refusal: Refusal) -> Json:
        """The last event of an answer that fails."""
        return refusal.body("anthropic")

    def _begin(self, prompt_tokens: int) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
