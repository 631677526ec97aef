"""Grammars that force tool calls in the format of a model's chat template. Pure.

`tool_call_forms.py` selects the format, and parses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.text.closed_schemas import closed
from edge.text.grammar import Grammar, JsonSchema, json_rule, text_rule
from edge.text.schema_errors import whose
from edge.text.tool_types import tool_types

MOST_CALLS = 16
"""Most calls in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentShape:
    """The format of one argument, for calls whose arguments are not a JSON object."""

    open: Callable[[str], str]
    """Makes the text before its value, from its name."""
    close: str
    """The text behind its value."""
    between: str = ""
    quotes: tuple[str, str] | None = None
    """The quotes around a literal text value; None: a text is JSON."""
    names: re.Pattern[str]
    """The names of arguments that can be written so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The format of calls."""

    open: Callable[[str], str]
    """Makes the text before the arguments, from the tool's name."""
    close: str
    """The text behind the arguments."""
    count: str = ""
    """The text before a call's number, which begins the call; "": calls are not numbered."""
    before: str = ""
    after: str = ""
    """The texts around all calls."""
    between: str = ""
    argument: ArgumentShape | None = None
    """The format of arguments; None: they are a JSON object."""
    names: re.Pattern[str] = re.compile(r"(?s:.*)")
    """The names of tools that can be written so."""
    otherwise: CallShape | None = None
    """The format for other names and arguments; the same reader parses it."""
    most_calls: int = MOST_CALLS
    thought: tuple[str, str] | None = None
    """The marks of text that may come before calls. A model whose prompt begins its thinking has
    finished it."""


def json_shape(
    *, before: str = "", after: str = "", between: str = "", key: str = "arguments"
) -> CallShape:
    """The format of calls as JSON objects."""
    return CallShape(
        open=lambda name: f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ',
        close="}" + after,
        between=between,
    )


def calls_grammar(
    tools: Sequence[Mapping[str, Any]],
    shape: CallShape,
    *,
    several: bool,
    or_else: JsonSchema | None = None,
) -> Grammar:
    """A grammar of answers that call some of these tools, with arguments by their schemas.

    tools: at least one schema of `tool_schemas`. several: allow more than one call. or_else: the
    schema of an answer without calls; None: it must call.
    """
    functions = [tool.get("function", tool) for tool in tools]
    functions = [{**each, "parameters": _arguments(each.get("parameters"))} for each in functions]
    while shape.otherwise is not None and not all(_fits(each, shape) for each in functions):
        shape = shape.otherwise
    rules = []
    for number, function in enumerate(functions):
        start, end = text_rule(shape.open(function["name"])), text_rule(shape.close)
        if shape.count:
            start = f"{text_rule(shape.count)} /[0-9]{{1,3}}/ {start}"
        if shape.argument is None:
            parameters = json_rule(function["parameters"])
            rules.append(whose(f"the schema of the tool {json.dumps(function['name'])}"))
            rules.append(f"arguments_{number}: {parameters}")
            arguments = f"arguments_{number}"
        else:
            arguments = _written(function, shape.argument, number, rules)
        rules.append(f"call_{number}: {start} {arguments} {end}")
    most = min(MOST_CALLS, shape.most_calls)
    more = f" ({text_rule(shape.between)} call){{0,{most - 1}}}" if several and most > 1 else ""
    answer = "calls"
    if or_else is not None:
        answer += " | said"
        rules.append(f"said: {json_rule(or_else)}")
    choices = " | ".join(f"call_{number}" for number in range(len(tools)))
    calls = f"calls: {text_rule(shape.before)} call{more} {text_rule(shape.after)}"
    if shape.thought is not None:
        begin, end = map(text_rule, shape.thought)
        answer = f"({begin} thought)? ({answer})"
        rules.append(f"thought[suffix={end}]: /(?s:.*)/")
    return Grammar("\n".join([f"start: {answer}", calls, f"call: {choices}", *rules]))


def _fits(function: Mapping[str, Any], shape: CallShape) -> bool:
    if shape.names.fullmatch(function["name"]) is None:
        return False
    return shape.argument is None or _plain(function, shape.argument) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    name: str
    schema: JsonSchema
    is_required: bool
    texts: tuple[str, ...] | None
    """The allowed literal texts; empty: any. None: the value is JSON."""


_OF_OBJECTS = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
)
_OF_TEXTS = frozenset({"type", "enum", "const", "description", "title", "default", "examples"})


def _plain(function: Mapping[str, Any], shape: ArgumentShape) -> list[_Argument] | None:
    """The arguments for writing one by one; None: the schema needs a JSON object."""
    schema = function["parameters"]
    if not schema.keys() <= _OF_OBJECTS:
        return None
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if schema.get("type", "object") != "object":
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    types = tool_types([function])[function["name"]]
    found = []
    for name, value in properties.items():
        if not isinstance(value, Mapping) or shape.names.fullmatch(name) is None:
            return None
        if '"$ref"' in json.dumps(value, default=str):
            return None
        texts = None
        if shape.quotes is not None and types[name] == ("string",):
            texts = _texts(value, (shape.quotes[1] + shape.close).strip())
            if texts is None:
                return None
        elif shape.quotes is not None and ("string" in types[name] or not types[name]):
            return None
        found.append(_Argument(name=name, schema=value, is_required=name in required, texts=texts))
    return found


def _texts(schema: Mapping[str, Any], end: str) -> tuple[str, ...] | None:
    """The texts that a schema allows, empty for any; None: not a plain list of texts."""
    if not schema.keys() <= _OF_TEXTS:
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        return None
    return tuple(values) if not any(end in each for each in values) else None


def _written(
    function: Mapping[str, Any], shape: ArgumentShape, number: int, rules: list[str]
) -> str:
    """The right side of a rule for the arguments, in the schema's order; adds helper rules."""
    arguments = _plain(function, shape)
    if not arguments:
        return ""
    tool = json.dumps(function["name"])
    for place, argument in enumerate(arguments):
        name = f"{number}_{place}"
        value, before, after = f"value_{name}", "", shape.close
        if argument.texts is None or shape.quotes is None:
            words = f"the schema of {json.dumps(argument.name)}, of the tool {tool},"
            rules += [whose(words), f"{value}: {json_rule(argument.schema)}"]
        elif argument.texts:
            before, after = shape.quotes[0], shape.quotes[1] + after
            value = f"({' | '.join(map(text_rule, argument.texts))})"
        else:
            before, until = shape.quotes[0], shape.quotes[1] + after
            rules.append(f"{value}[suffix={text_rule(until)}]: /(?s:.*)/")
            after = ""
        opened = text_rule(shape.open(argument.name) + before)
        rules.append(f"argument_{name}: {opened} {value} {text_rule(after)}")
    # From the last to the first: the rest after an earlier argument, and without one.
    between = f"{text_rule(shape.between)} " if shape.between else ""
    follow, first = "", None
    for place in reversed(range(len(arguments))):
        one, is_required = f"argument_{number}_{place}", arguments[place].is_required
        begin = f"{one} {follow}"
        first = begin if is_required or first is None else f"{begin} | first_{number}_{place + 1}"
        rules.append(f"first_{number}_{place}: {first}")
        rules.append(
            f"follow_{number}_{place}: ({between}{one}){'' if is_required else '?'} {follow}"
        )
        follow = f"follow_{number}_{place}"
    may_be_none = not any(each.is_required for each in arguments)
    return f"first_{number}_0{'?' if may_be_none else ''}"


def _arguments(parameters: object) -> Mapping[str, Any]:
    """The schema of arguments as an object; without properties if the schema is empty."""
    if not isinstance(parameters, Mapping) or not parameters:
        parameters = {"properties": {}}
    if not any(key in parameters for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
        parameters = {"type": "object", **parameters}
    if parameters.get("properties") == {}:
        parameters = {"additionalProperties": False, **parameters}
    return closed(parameters)
