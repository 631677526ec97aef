"""Tools of Anthropic's clients: those with a schema, and known ones named by a type alone."""

from __future__ import annotations

from typing import Any

from edge.server.fields import Fields
from edge.server.tools import OfferedTools, forced_offer, schema

Json = dict[str, Any]

TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Blocks of a message that add tools to the offer, or remove them."""

_OF_SERVERS = ("mcp_tool_reference", "mcp_toolset_reference")
"""Tools that a service would run. The model is not told of them."""


def offered(body: Fields) -> OfferedTools:
    """The tools that a request offers, without those that a service would run. Raises Refusal if
    none are left: the client would take an answer without a search for the result of one."""
    choice = body.object("tool_choice") or Fields({"type": "auto"}, body.place("tool_choice"))
    kind = choice.one_of("type", ("auto", "none", "any", "tool"))
    several = not choice.flag("disable_parallel_tool_use")
    tools = in_effect(body)
    found = [one for tool in tools if (one := _schema(tool)) is not None]
    if tools and not found and kind != "none":
        raise body.refuse(
            "tools",
            f"has nothing but {tools[0].text('type')!r:.80}, which this server does not run",
        )
    if kind in {"any", "tool"}:
        name = choice.need_text("name") if kind == "tool" else None
        return forced_offer(found, name, body, several=several)
    return OfferedTools(tools=[] if kind == "none" else found, several=several)


def in_effect(body: Fields) -> list[Fields]:
    """The tools at the end of the conversation: those of the request, changed by the additions,
    removals and definitions in its messages."""
    found = {_key(tool): tool for tool in body.objects("tools")}
    gone: dict[str, Fields] = {}
    for message in body.objects("messages"):
        if isinstance(message.raw("content"), str | None):
            continue
        for block in message.objects("content"):
            parts = block.objects("tool_changes") if block.raw("type") == "compaction" else [block]
            for part in parts:
                if part.raw("type") in TOOL_CHANGES:
                    _change(found, gone, part)
    return list(found.values())


def _change(found: dict[str, Fields], gone: dict[str, Fields], part: Fields) -> None:
    tool = part.object("tool")
    if tool is None:
        raise part.refuse("tool", "is missing")
    kind = tool.one_of("type", ("tool_reference", "tool_definition", *_OF_SERVERS))
    if kind in _OF_SERVERS:
        return
    if kind == "tool_definition":
        defined = tool.object("definition")
        if defined is None:
            raise tool.refuse("definition", "is missing")
        found[_key(defined)] = defined
        return
    name = tool.need_text("name")
    source, target = (gone, found) if part.raw("type") == "tool_addition" else (found, gone)
    if name in source:
        target[name] = source.pop(name)
    elif name not in target:
        raise tool.refuse("name", f"is {name!r:.80}, which is not among the tools")


def _key(tool: Fields) -> str:
    return tool.text("name") or tool.text("type") or ""


def _schema(tool: Fields) -> Json | None:
    """The schema of a tool; None for a tool that the client does not run itself."""
    kind = tool.text("type") or "custom"
    if kind == "custom" or "input_schema" in tool:
        return schema(tool, parameters="input_schema")
    known = next((each for name, each in _KNOWN.items() if kind.startswith(name)), None)
    if known is None:
        return None
    return {"type": "function", "function": {"name": tool.need_text("name"), **known}}


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _one_of(*commands: str) -> Json:
    return {"type": "string", "enum": list(commands), "description": "What is done"}


def _known(description: str, needed: tuple[str, ...], **properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": list(needed)}
    return {"description": description, "parameters": parameters}


_RANGE: Json = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line that are viewed; -1: the end",
}
_EDITS: Json = {
    "path": _text("Of the file, or of a folder"),
    "view_range": _RANGE,
    "file_text": _text("What a file that is created holds"),
    "old_str": _text("What str_replace replaces: it must be in the file once"),
    "new_str": _text("What comes in its place"),
    "insert_line": {
        "type": "integer",
        "description": "Behind which line insert puts its text; 0: before the first",
    },
}
_INSERTED = _text("What insert puts in")
_COMMANDS = ("view", "create", "str_replace", "insert")
_OLD_EDITOR = _known(
    "Views and edits files. insert takes its text from new_str.",
    ("command", "path"),
    command=_one_of(*_COMMANDS, "undo_edit"),
    **_EDITS,
)

_KNOWN: Json = {
    "bash_": _known(
        "Runs a command in a shell that stays open from call to call.",
        ("command",),
        command=_text("What is run"),
        restart={"type": "boolean", "description": "Whether the shell is begun anew first"},
    ),
    "text_editor_2024": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_": _known(
        "Views and edits files.",
        ("command", "path"),
        command=_one_of(*_COMMANDS),
        **_EDITS,
        insert_text=_INSERTED,
    ),
    "memory_": _known(
        "Reads and writes notes that are kept from one conversation to the next: files below "
        "/memories.",
        ("command",),
        command=_one_of(*_COMMANDS, "delete", "rename"),
        **_EDITS,
        insert_text=_INSERTED,
        old_path=_text("What rename finds"),
        new_path=_text("What it is called then"),
    ),
}
"""Schemas of tools that clients name by type only, by the prefix of the type. After
https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview, in words of our own."""
