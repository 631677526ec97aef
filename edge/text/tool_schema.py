"""JSON schemas of tools from Python functions, like `transformers.utils.get_json_schema`.

Types come from its signature, descriptions from its docstring in Google's style:

    def weather(city: str, days: int = 1) -> str:
        '''The weather of a city.

        Args:
            city: Its name.
            days: How far to look ahead. (choices: [1, 2, 3])
        '''
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edge.errors import RequestError, shown

Tool = Mapping[str, object] | Callable[..., object]
"""A JSON schema, or a function to make one from."""

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
_PLAIN = {**_SCALARS, list: "array", tuple: "array", dict: "object"}
_SECTION = r"(?:Args|Returns|Raises):"
_ARGUMENT = re.compile(r"^([ \t]*)(\w+)[ \t]*:[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def tool_schemas(tools: Sequence[Tool] | None) -> list[Mapping[str, object]] | None:
    """The schema of each tool for chat templates; None without tools.

    Raises RequestError, naming the function, for a function without the needed annotations.
    """
    if tools is None or tools == []:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of functions, or of their JSON schemas")
    found: list[Mapping[str, object]] = []
    for tool in tools:
        if isinstance(tool, Mapping):
            found.append(tool)
        elif callable(tool):
            found.append(function_schema(tool))
        else:
            raise RequestError(f"a tool must be a function or its JSON schema, not {shown(tool)}")
    return found


def function_schema(function: Callable[..., object]) -> dict[str, Any]:
    """The schema of a function. Raises RequestError if it lacks a docstring, or if an argument
    lacks a description or a type of JSON."""
    name = getattr(function, "__name__", type(function).__name__)
    doc = inspect.getdoc(function) if inspect.isroutine(function) else None
    if not doc or not doc.strip():
        raise RequestError(
            f"tool {name} has no docstring",
            remedy="describe there the tool, and each argument under Args:",
        )
    sections = _sections(doc.strip())
    described = _arguments(sections.get("Args", ""))
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise RequestError(
            f"tool {name} has a type that cannot be found: {error}",
            remedy="annotate it with another",
        ) from error
    properties: dict[str, Any] = {}
    required = []
    for each, parameter in inspect.signature(function).parameters.items():
        if not properties and each in ("self", "cls") and each not in hints:
            continue
        if each not in hints:
            raise RequestError(f"tool {name} has no type for {each}", remedy="annotate it")
        if each not in described:
            raise RequestError(
                f"the docstring of tool {name} does not describe {each}",
                remedy="add it under Args:",
            )
        if parameter.default is inspect.Parameter.empty:
            required.append(each)
        schema = _type_schema(hints[each], f"{each} of tool {name}")
        said = described[each]
        if choices := _CHOICES.search(said):
            schema["enum"] = _choices(choices[1], f"{each} of tool {name}")
            said = said[: choices.start()].strip()
        properties[each] = {**schema, "description": said}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    made = {"name": name, "description": sections[""], "parameters": parameters}
    if "return" in hints and (returned := _return_schema(hints["return"])) is not None:
        if sections.get("Returns"):
            returned["description"] = sections["Returns"].strip()
        made["return"] = returned
    return {"type": "function", "function": made}


def _return_schema(hint: Any) -> dict[str, Any] | None:
    """The schema of the return value; None if JSON has no such type, as models do not need it."""
    try:
        return _type_schema(hint, "its return value")
    except RequestError:
        return None


def _type_schema(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in _PLAIN and origin is None:
        return {"type": _PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_schema([member.value for member in hint], what)
    if origin is Literal:
        return _enum_schema(list(arguments), what)
    if origin in (Union, UnionType):
        return _union_schema(arguments, what)
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], what)}
    if origin is tuple and len(arguments) > 1 and Ellipsis not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(each, what) for each in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], what)}
    raise RequestError(
        f"{what} has a type that JSON does not have ({hint})",
        remedy="use int, float, str, bool, list, dict, Literal, an Enum or unions of these, or "
        "give the tool's JSON schema instead",
    )


def _union_schema(arguments: tuple[Any, ...], what: str) -> dict[str, Any]:
    held = [_type_schema(each, what) for each in arguments if each is not NoneType]
    if len(held) == 1:
        (schema,) = held
    elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in held):
        kinds = sorted({each["type"] for each in held})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": held}
    return {**schema, "nullable": True} if NoneType in arguments else schema


def _enum_schema(values: list[Any], what: str) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise RequestError(
            f"{what} has values that JSON does not have: {shown(values)}",
            remedy="use texts, numbers, true, false or none",
        )
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _choices(text: str, what: str) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise RequestError(
            f"the choices of {what} are no JSON list", remedy='write them as ["a", "b"]'
        )
    return [value.strip() if isinstance(value, str) else value for value in values]


def _sections(doc: str) -> dict[str, str]:
    """The sections of a docstring by name; the text before them under ""."""
    parts = re.split(rf"(?m)^[ \t]*({_SECTION})[ \t]*$", doc)
    found = {"": parts[0].strip()}
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(title.removesuffix(":"), text)
    return found


def _arguments(text: str) -> dict[str, str]:
    """The descriptions by argument; deeper lines continue one."""
    found: dict[str, str] = {}
    name, indent = "", 0
    for line in filter(str.strip, text.splitlines()):
        match = _ARGUMENT.match(line)
        if match and (not found or len(match[1].expandtabs()) <= indent):
            name, indent = match[2], len(match[1].expandtabs())
            found[name] = match[3].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
