"""Tools that a client offers, and earlier calls of them, as chat templates take them."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.server.bodies import MOST_TOOLS
from edge.server.fields import Fields
from edge.server.text_tools import CUSTOM_INPUT, text_taker
from edge.text.answer_parts import ToolCall

CALLED = ("function", "custom")
"""Types of OpenAI's tools that clients run and describe; the second takes a text."""

Json = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def schema(tool: Fields, *, parameters: str = "parameters") -> Json:
    """One tool as a function. parameters: the field with the schema of its arguments."""
    wanted = tool.object(parameters)
    function: Json = {
        "name": tool.need_text("name"),
        "description": tool.text("description") or "",
        "parameters": {} if wanted is None else dict(wanted.items()),
    }
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request, those of which one must be called, and whether several may be."""

    tools: Sequence[Json]
    forced: Sequence[Json] = ()
    several: bool = True


def forced_offer(
    tools: Sequence[Json], name: str | None, body: Fields, *, several: bool = True
) -> OfferedTools:
    """An offer of which one tool must be called, or the tool of this name. Raises Refusal if there
    is no such tool."""
    forced = [tool for tool in tools if name in {None, tool["function"]["name"]}]
    if not forced:
        wanted = "a tool" if name is None else f"{name!r:.80}"
        raise body.refuse("tool_choice", f"wants {wanted}, which is not among the tools")
    return OfferedTools(tools=tools, forced=forced, several=several and name is None)


def openai_tools(body: Fields, *, flat: bool = False) -> OfferedTools:
    """The tools of a request. flat: a tool's name is beside its type, as in /v1/responses. Tools
    that a service would run, which agents offer by default, are left out."""
    found = []
    unkept: dict[str, Fields] = {}
    tools = body.objects("tools")
    if len(tools) > MOST_TOOLS:  # with those in namespaces
        raise body.refuse("tools", f"are {len(tools)}, and {MOST_TOOLS} are the most")
    for tool in tools:
        kind = tool.need_text("type")
        if flat and kind not in CALLED:
            continue
        held = _held(tool, flat=flat)
        if kind == "function":
            found.append(schema(held))
        else:
            taker, grammar = text_taker(held, flat=flat)
            found.append(taker)
            if grammar is not None:
                unkept[taker["function"]["name"]] = grammar
    offer = _chosen(body, found, flat=flat)
    for forced in offer.forced:
        if (grammar := unkept.get(forced["function"]["name"])) is not None:
            raise grammar.refuse(
                "syntax",
                f"is {grammar.raw('syntax')!r:.40}, to which this server keeps no call that must "
                "be made; give a regex, or let tool_choice be auto",
            )
    return offer


def _chosen(body: Fields, found: Sequence[Json], *, flat: bool) -> OfferedTools:
    several = body.raw("parallel_tool_calls") is not False
    if not isinstance(body.raw("tool_choice"), str | None):
        choice = body.object("tool_choice")
        assert choice is not None, "it is an object"
        if choice.one_of("type", (*CALLED, "allowed_tools")) == "allowed_tools":
            held = choice if flat else choice.object("allowed_tools")
            if held is None:
                raise choice.refuse("allowed_tools", "is missing")
            allowed = _allowed(found, held, flat=flat)
            if held.one_of("mode", ("auto", "required")) == "required":
                return forced_offer(allowed, None, body, several=several)
            return OfferedTools(tools=allowed, several=several)
        return forced_offer(found, _held(choice, flat=flat).need_text("name"), body)
    mode = "auto"
    if "tool_choice" in body:
        mode = body.one_of("tool_choice", ("auto", "none", "required"))
    if mode == "required":
        return forced_offer(found, None, body, several=several)
    return OfferedTools(tools=[] if mode == "none" else found, several=several)


def _allowed(tools: Sequence[Json], held: Fields, *, flat: bool) -> list[Json]:
    """The tools that a choice names. Raises Refusal for an unknown one."""
    names = set()
    for tool in held.objects("tools"):
        if flat and tool.need_text("type") not in CALLED:
            continue
        names.add(_held(tool, flat=flat).need_text("name"))
    found = [tool for tool in tools if tool["function"]["name"] in names]
    if missing := names - {tool["function"]["name"] for tool in found}:
        raise held.refuse("tools", f"has {min(missing)!r:.80}, which is not among the tools")
    return found


def _held(tool: Fields, *, flat: bool) -> Fields:
    """The object of a tool, a choice or a call that holds its name."""
    kind = tool.one_of("type", CALLED)
    held = tool if flat else tool.object(kind)
    if held is None:
        raise tool.refuse(kind, "is missing")
    return held


def text_takers(body: Fields) -> frozenset[str]:
    """Names of the custom tools of /v1/chat/completions."""
    custom = (tool.object("custom") for tool in body.objects("tools"))
    return frozenset(held.need_text("name") for held in custom if held is not None)


def called(name: str, arguments: object, call_id: str | None) -> Json:
    """An earlier call of the model. arguments: an object, or JSON in a text.

    Invalid arguments become an object, so that a call that another model broke stays in the
    conversation.
    """
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"arguments": arguments}
    call: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def openai_calls(message: Fields) -> list[Json]:
    """Calls of tools in an assistant's message."""
    calls = []
    for call in message.objects("tool_calls"):
        if call.text("type") == "custom":
            held = _held(call, flat=False)
            arguments: object = {CUSTOM_INPUT: held.need_text("input")}
        else:
            function = call.object("function")
            if function is None:
                raise call.refuse("function", "is missing")
            held, arguments = function, function.raw("arguments") or {}
        calls.append(called(held.need_text("name"), arguments, call.text("id")))
    return calls


def arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
