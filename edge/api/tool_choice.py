"""The tools that an answer may or must call, and the grammar for its options. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge.answers.terms import GenerationOptions
from edge.errors import RequestError, shown
from edge.text.answer_forms import AnswerForm
from edge.text.tool_call_grammars import calls_grammar

Schemas = Sequence[Mapping[str, Any]]
"""Tools as the result of `tool_schemas`."""


def chosen(tools: Schemas, choice: str) -> tuple[Schemas, Schemas]:
    """The tools to offer, and those of which one must be called. choice: auto, none, required, or
    the name of a tool.

    Raises RequestError for an unknown name, and for "required" without tools.
    """
    if choice in ("auto", "none"):
        return (tools if choice == "auto" else ()), ()
    must = [tool for tool in tools if choice in ("required", tool.get("function", tool)["name"])]
    if not must:
        wanted = "a tool" if choice == "required" else shown(choice)
        raise RequestError(
            f"tool_choice wants {wanted}, which is not among the tools",
            remedy="give a tool of that name" if tools else "give tools",
        )
    return tools, must


def with_calls(
    options: GenerationOptions,
    form: AnswerForm,
    *,
    tools: Schemas,
    must: Schemas = (),
    several: bool = True,
) -> GenerationOptions:
    """The options, with a grammar if the answer must have calls, or may have calls in place of a
    structured output.

    form: the model's format of calls. must: tools of which one must be called. several: more than
    one call is allowed.
    """
    if not must and (options.json_schema is None or not tools):
        return options
    or_else = None if must else options.json_schema
    grammar = calls_grammar(must or tools, form.call_form.shape, several=several, or_else=or_else)
    return replace(options, json_schema=None, grammar=grammar.rules)
