"""Tools of /v1/responses by the names that the model knows, and by those of the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.server.fields import Fields
from edge.server.tools import CALLED

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


def named(body: Fields) -> Fields:
    """The request with each tool, and the choice of one, under the name that the model knows. Tools
    that a service would run stay as they are. What an item offers again is there once."""
    found = dict(body.items())
    found["tools"] = tools = []
    names = set()
    for namespace, tool in _each(body):
        each = _named(namespace, tool)
        if tool.text("type") in CALLED:
            if each["name"] in names:
                continue
            names.add(each["name"])
        tools.append(each)
    choice = body.raw("tool_choice")
    if isinstance(choice, dict):
        asked = Fields(choice, body.place("tool_choice"))
        found["tool_choice"] = _chosen(asked)
        if asked.raw("type") == "allowed_tools":
            found["tool_choice"] = {**choice, "tools": list(map(_chosen, asked.objects("tools")))}
    return Fields(found)


def _named(namespace: str | None, tool: Fields) -> Json:
    if tool.text("type") not in CALLED:
        return dict(tool.items())
    return {**dict(tool.items()), "name": full_name(namespace, tool.need_text("name"))}


def _chosen(tool: Fields) -> Json:
    """As a choice names it."""
    return _named(tool.text("namespace"), tool)


def origins(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Origin]:
    """By the names that the model knows, of tools that were read before."""
    return {
        full_name(namespace, tool.need_text("name")): Origin(
            name=tool.need_text("name"),
            namespace=namespace,
            takes_text=tool.text("type") == "custom",
        )
        for namespace, tool in _each(Fields({"tools": list(tools)}))
        if tool.text("type") in CALLED
    }


def _each(body: Fields) -> Iterator[tuple[str | None, Fields]]:
    """Every tool, and the namespace that it is of."""
    for tool in body.objects("tools"):
        if tool.text("type") == "namespace":
            namespace = tool.need_text("name")
            yield from ((namespace, each) for each in tool.objects("tools"))
        else:
            yield None, tool
