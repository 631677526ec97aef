"""Tools of /v1/responses: the names that the model sees, and those of the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.server.fields import Fields
from edge.server.tools import CALLED

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The name of a tool in a client's request."""

    name: str
    namespace: str | None = None
    takes_text: bool = False


def full_name(namespace: str | None, name: str) -> str:
    """The name of a namespace's tool for the model, in the form that agents use elsewhere."""
    return name if not namespace else f"{namespace}__{name}"


def named(body: Fields) -> Fields:
    """The request with the model's names in its tools and its choice of one. Tools that a service
    would run keep their names. A tool that is offered twice is there once."""
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
    """The tool's entry in a choice of tools."""
    return _named(tool.text("namespace"), tool)


def origins(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Origin]:
    """Clients' names by the names that the model sees, of tools that `named` has renamed."""
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
    """Each tool with its namespace."""
    for tool in body.objects("tools"):
        if tool.text("type") == "namespace":
            namespace = tool.need_text("name")
            yield from ((namespace, each) for each in tool.objects("tools"))
        else:
            yield None, tool
