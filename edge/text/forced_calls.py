"""Grammars of answers that must call tools, in the form that a model's chat template teaches. Pure.

    <tool_call>                                            of templates that have this mark
    {"name": …, "arguments": …}
    </tool_call>
    {"name": …, "parameters": …}; …                        of others, as Llama 3's

`answer_parts.py` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.text.grammar import Grammar, JsonSchema, json_rule, text_rule

MOST_CALLS = 16
"""Of one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes a call."""

    before: str
    after: str
    between: str
    arguments_key: str


def call_form(template: str) -> CallForm:
    """That of a chat template; its source may be empty."""
    if "<tool_call>" in template:
        return CallForm(
            before="<tool_call>\n", after="\n</tool_call>", between="\n", arguments_key="arguments"
        )
    key = "arguments" if '"parameters"' not in template else "parameters"
    return CallForm(before="", after="", between="; ", arguments_key=key)


def calls_grammar(
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    *,
    several: bool,
    or_else: JsonSchema | None = None,
) -> Grammar:
    """Of answers that call some of these tools, with arguments as their schemas say.

    tools: schemas as `tool_schemas` makes them, at least one. several: or exactly one is called.
    or_else: what an answer without calls must be; None: it must call.
    """
    rules = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = json.dumps(function["name"], ensure_ascii=False)
        start = f'{form.before}{{"name": {name}, "{form.arguments_key}": '
        end = text_rule("}" + form.after)
        rules += [
            f"call_{number}: {text_rule(start)} arguments_{number} {end}",
            f"arguments_{number}: {json_rule(_arguments(function.get('parameters')))}",
        ]
    more = f" ({text_rule(form.between)} call){{0,{MOST_CALLS - 1}}}" if several else ""
    answer = "calls"
    if or_else is not None:
        answer += " | said"
        rules.append(f"said: {json_rule(or_else)}")
    choices = " | ".join(f"call_{number}" for number in range(len(tools)))
    return Grammar(
        "\n".join([f"start: {answer}", f"calls: call{more}", f"call: {choices}", *rules])
    )


def _arguments(parameters: object) -> JsonSchema:
    """Arguments are an object, whether the schema says so or not."""
    if not isinstance(parameters, Mapping) or not parameters:
        return "object"
    if any(key in parameters for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
        return parameters
    return {"type": "object", **parameters}
