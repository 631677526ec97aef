"""Tools that a client offers, and calls of them in a conversation, as chat templates take them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from edge.server.fields import Fields
from edge.server.refusals import Refusal
from edge.text.answer_parts import ToolCall

MOST_TOOLS = 256

Json = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def schema(tool: Fields, *, parameters: str = "parameters") -> Json:
    """One tool; `parameters` is the name of what its arguments must be."""
    wanted = tool.object(parameters)
    function: Json = {
        "name": tool.need_text("name"),
        "description": tool.text("description") or "",
        "parameters": {} if wanted is None else dict(wanted.items()),
    }
    return {"type": "function", "function": function}


def openai_tools(body: Fields, *, flat: bool = False) -> list[Json]:
    """flat: a tool's name lies beside its type, as in /v1/responses."""
    found = []
    for tool in checked(body):
        tool.one_of("type", ("function",))
        function = tool if flat else tool.object("function")
        if function is None:
            raise tool.refuse("function", "is missing")
        found.append(schema(function))
    choice = body.raw("tool_choice")
    if choice == "none":
        return []
    if choice not in {None, "auto"} if isinstance(choice, str | None) else True:
        raise body.refuse("tool_choice", "must be auto or none: the model chooses by itself")
    return found


def checked(body: Fields) -> list[Fields]:
    tools = body.objects("tools")
    if len(tools) > MOST_TOOLS:
        raise body.refuse("tools", f"are {len(tools)}, and {MOST_TOOLS} are the most")
    return tools


def called(name: str, arguments: object, call_id: str | None, place: Fields) -> Json:
    """A call that the model made before. Arguments may be JSON in a text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise place.refuse("arguments", "are no JSON") from None
    if not isinstance(arguments, Mapping):
        raise place.refuse("arguments", "must be a JSON object")
    call: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def openai_calls(message: Fields) -> list[Json]:
    """Of an assistant's message."""
    calls = []
    for call in message.objects("tool_calls"):
        function = call.object("function")
        if function is None:
            raise call.refuse("function", "is missing")
        name, arguments = function.need_text("name"), function.raw("arguments")
        calls.append(called(name, arguments or {}, call.text("id"), function))
    return calls


def arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def refuse_forced(kind: str, allowed: Sequence[str]) -> None:
    """Which tool is called, and whether one is, the model decides."""
    if kind not in allowed:
        raise Refusal(
            400,
            f"tool_choice is {kind!r:.40}; only {' and '.join(allowed)} are supported",
            param="tool_choice",
        )
