"""Items of /v1/responses as messages for chat templates. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edge.server.fields import Fields
from edge.server.history import Message
from edge.server.openai_fields import content_of, message_of, seen_content
from edge.server.pictures import Content
from edge.server.refusals import Refusal
from edge.server.response_tools import full_name
from edge.server.text_tools import CUSTOM_INPUT
from edge.server.tools import called

_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "mcp_call": "arguments",
}
"""The field with the arguments of a call, by the type of its item."""

_PASSED_OVER = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "tool_search_call", "program", "program_output"),
        "agent_reasoning",
    )
)
"""Items about what a service did for another model; they are left out."""

_UPDATE = "configuration_update"
_OFFERS = ("additional_tools", "tool_search_output")
"""Items that add tools to the offer."""

_REFUSED = {
    "compaction": "is a summary that only the service can read that made it; send the conversation "
    "itself, or its summary as a message",
    "compaction_trigger": "asks for a summary that this server does not make; ask for one in a "
    "message of the user",
}


def updated(body: Fields) -> Fields:
    """The request with the changes that its items make: added tools, and the last effort and form
    of an answer."""
    if not isinstance(body.raw("input"), list):
        return body
    found = dict(body.items())
    for item in body.objects("input"):
        if item.raw("type") in _OFFERS:
            offered = [*Fields(found).objects("tools"), *item.objects("tools")]
            found["tools"] = [dict(tool.items()) for tool in offered]
        elif item.raw("type") == _UPDATE:
            for name in ("reasoning", "text"):
                before, update = Fields(found).object(name), item.object(name)
                if update is not None:
                    old = {} if before is None else dict(before.items())
                    found[name] = old | dict(update.items())
    return Fields(found)


def messages_of(items: Sequence[Fields]) -> list[Message]:
    """A message for each item; thoughts are joined to the message that follows them."""
    found: list[Message] = []
    thought = ""
    for item in items:
        kind = item.text("type") or "message"
        if kind == "reasoning":  # it has no text if another service made it
            texts = [*item.objects("content"), *item.objects("summary")]
            thought = next((text for each in texts if (text := each.text("text"))), thought)
            continue
        if kind in _PASSED_OVER or kind in _OFFERS or kind == _UPDATE:
            continue
        if kind == "agent_message" and not item.raw("content"):  # only its service can read it
            continue
        first, *others = _messages(kind, item)
        if thought and first["role"] == "assistant":
            first = {**first, "reasoning_content": thought}
        thought = ""
        found += [first, *others]
    return found


def _messages(kind: str, item: Fields) -> list[Message]:
    if kind == "message":
        return [message_of(item)]
    if kind == "agent_message":  # of another agent
        return [{"role": "user", "content": content_of(item)}]
    if kind in _CALLS:
        call_id = item.text("call_id") or item.text("id")
        call = called(_name(kind, item), _arguments(kind, item), call_id)
        found: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        if kind == "mcp_call":  # it includes the result
            told = item.raw("output") or item.raw("error") or ""
            found.append({"role": "tool", "content": _told(told), "tool_call_id": call_id})
        return found
    if kind.endswith("_call_output") and kind.removesuffix("_output") in _CALLS:
        result = {"role": "tool", "content": _output(kind, item)}
        call_id = item.text("call_id") or item.text("id")
        if call_id is None:  # then its tool is named
            return [{**result, "name": full_name(item.text("namespace"), item.need_text("name"))}]
        return [{**result, "tool_call_id": call_id}]
    if kind == "item_reference":
        raise not_stored(item, "id")
    if kind in _REFUSED:
        raise item.refuse("type", f"{kind} {_REFUSED[kind]}")
    raise item.refuse("type", f"is {kind!r:.40}; only messages and calls are read")


def _name(kind: str, item: Fields) -> str:
    if "name" in item or kind in {"function_call", "custom_tool_call", "mcp_call"}:
        return full_name(item.text("namespace"), item.need_text("name"))
    return kind.removesuffix("_call")


def _arguments(kind: str, item: Fields) -> object:
    value = item.raw(_CALLS[kind])
    if kind == "custom_tool_call":
        return {CUSTOM_INPUT: item.need_text("input")}
    return value or {}


def _output(kind: str, item: Fields) -> Content:
    if kind == "shell_call_output":
        return _told(item.raw("output"))
    if kind == "apply_patch_call_output" and "output" not in item:
        return item.text("status") or ""
    return seen_content(item, "output", of_tool=True)


def _told(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def not_stored(body: Fields, name: str) -> Refusal:
    """A refusal of a field that names an earlier response or a part of one."""
    refusal = body.refuse(
        name,
        "names an earlier response, and this server stores none; send the whole conversation as "
        "input",
    )
    return Refusal(400, refusal.message, param=refusal.param, code="previous_response_not_found")
