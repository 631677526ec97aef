"""Tools of /v1/responses that are no functions, as functions of a chat template, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.server.fields import Fields

CUSTOM_INPUT = "input"
"""The only argument of a tool that takes a text, where it is called as others are."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a client calls a tool."""

    name: str
    namespace: str | None = None
    takes_text: bool = False


def full_name(namespace: str | None, name: str) -> str:
    """By that the model knows a tool of a namespace, as agents call them elsewhere, too."""
    return name if not namespace else f"{namespace}__{name}"


def as_functions(body: Fields) -> Fields:
    """The request with each tool, and the choice of one, as a function. Tools that a service would
    run stay as they are."""
    found = dict(body.items())
    found["tools"] = [_as_function(namespace, tool) for namespace, tool in _each(body)]
    choice = body.raw("tool_choice")
    if isinstance(choice, dict):
        asked = Fields(choice, body.place("tool_choice"))
        found["tool_choice"] = _chosen(asked)
        if asked.raw("type") == "allowed_tools":
            found["tool_choice"] = {**choice, "tools": list(map(_chosen, asked.objects("tools")))}
    return Fields(found)


def _chosen(tool: Fields) -> Json:
    """As a choice names it."""
    if tool.raw("type") not in ("custom", "function"):
        return dict(tool.items())
    name = full_name(tool.text("namespace"), tool.need_text("name"))
    return {"type": "function", "name": name}


def origins(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Origin]:
    """By the names that the model knows, of tools that were read before."""
    return {
        full_name(namespace, tool.need_text("name")): Origin(
            name=tool.need_text("name"),
            namespace=namespace,
            takes_text=tool.text("type") == "custom",
        )
        for namespace, tool in _each(Fields({"tools": list(tools)}))
        if tool.text("type") in {"custom", "function"}
    }


def _each(body: Fields) -> Iterator[tuple[str | None, Fields]]:
    """Every tool, and the namespace that it is of."""
    for tool in body.objects("tools"):
        if tool.text("type") == "namespace":
            namespace = tool.need_text("name")
            yield from ((namespace, each) for each in tool.objects("tools"))
        else:
            yield None, tool


def _as_function(namespace: str | None, tool: Fields) -> Json:
    kind = tool.text("type")
    if kind not in {"custom", "function"}:
        return dict(tool.items())
    named = {"type": "function", "name": full_name(namespace, tool.need_text("name"))}
    return {**dict(tool.items()), **(_text_taker(tool) if kind == "custom" else {}), **named}


def _text_taker(tool: Fields) -> Json:
    """Its grammar is told to the model, and not kept to."""
    said = [tool.text("description") or ""]
    form = tool.object("format")
    if form is not None and "definition" in form:
        syntax = form.text("syntax") or "grammar"
        said.append(f"Its input is of this {syntax}:\n{form.need_text('definition')}")
    return {
        "description": "\n\n".join(filter(None, said)),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        },
    }
