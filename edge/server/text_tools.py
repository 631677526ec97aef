"""OpenAI's custom tools, which take a text, as functions for chat templates."""

from __future__ import annotations

from typing import Any

from edge.server.fields import Fields
from edge.text.answer_parts import ToolCall

CUSTOM_INPUT = "input"
"""The argument of the function that stands for a custom tool."""

Json = dict[str, Any]


def text_taker(tool: Fields, *, flat: bool) -> tuple[Json, Fields | None]:
    """A custom tool as a function, and its grammar if calls are not kept to it.

    A regular expression becomes a pattern in the argument's schema. Other grammars are only
    described to the model.
    """
    said = [tool.text("description") or ""]
    taken: Json = {"type": "string"}
    grammar = tool.object("format")
    if grammar is not None and not flat and grammar.text("type") == "grammar":
        grammar = grammar.object("grammar") or grammar
    is_told = grammar is not None and "definition" in grammar
    if is_told:
        assert grammar is not None
        syntax, definition = grammar.text("syntax"), grammar.need_text("definition")
        if syntax == "regex":
            taken["pattern"] = f"^(?:{definition})$"
            is_told = False
        else:
            said.append(f"Its input is of this {syntax or 'grammar'}:\n{definition}")
    function = {
        "name": tool.need_text("name"),
        "description": "\n\n".join(filter(None, said)),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: taken},
            "required": [CUSTOM_INPUT],
        },
    }
    return {"type": "function", "function": function}, grammar if is_told else None


def text_given(call: ToolCall) -> str | None:
    """The text that a call passes to a custom tool; None if the argument is no text."""
    given = call.arguments.get(CUSTOM_INPUT)
    return given if isinstance(given, str) else None
