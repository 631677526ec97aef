"""The JSON types of tools' arguments, for formats of calls that write values unquoted. Pure.

A schema is read once, when an answer begins; the result is small.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge.text.schema_references import referenced

ToolTypes = Mapping[str, Mapping[str, tuple[str, ...]]]
"""The types of an argument, by tool and argument; empty: its schema does not say."""

_MOST_DEPTH = 8
"""Most levels of nested anyOf."""

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_KINDS: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_KNOWN = frozenset(_KINDS.values())


def tool_types(
    schemas: Sequence[Mapping[str, Any]] | None,
) -> dict[str, dict[str, tuple[str, ...]]]:
    """The types for the tools of `tool_schemas`; schemas are not checked."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for schema in schemas or ():
        function = schema.get("function", schema)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        root = function.get("parameters")
        properties = root.get("properties") if isinstance(root, Mapping) else None
        found[function["name"]] = {
            str(name): tuple(dict.fromkeys(_types(each, root, set(), _MOST_DEPTH)))
            for name, each in (properties if isinstance(properties, Mapping) else {}).items()
        }
    return found


def typed(text: str, types: tuple[str, ...]) -> Any:
    """The value of a text by these types, other types before texts, in their order.

    Without types it is parsed as JSON. Text of none of the types stays a text.
    """
    if not types:
        try:
            return parsed(text)
        except ValueError:
            return text
    bare = text.strip()
    for kind in types:
        match kind:
            case "boolean" if bare.lower() in ("true", "false"):
                return bare.lower() == "true"
            case "null" if bare in ("null", "None"):
                return None
            case "integer" | "number" if _NUMBER.fullmatch(bare):
                value = _number(bare, kind)
                if value is not None:
                    return value
            case "array" | "object":
                try:
                    value = parsed(bare)
                except ValueError:
                    continue
                if isinstance(value, list if kind == "array" else dict):
                    return value
    return text


def parsed(text: str) -> Any:
    """A model's JSON. Raises ValueError for invalid JSON, and for NaN and Infinity."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=finite)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def finite(text: str) -> float:
    """A float. Raises ValueError for a number beyond float's range, which JSON cannot express."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("it is beyond the range of a float")
    return value


def _number(text: str, kind: str) -> int | float | None:
    try:
        if text.lstrip("-").isdigit():
            return int(text)
        value = finite(text)
    except ValueError:
        return None
    if kind == "integer":
        return int(value) if value.is_integer() else None
    return value


def _types(schema: Any, root: Any, seen: set[str], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    for kind in declared if isinstance(declared, list) else [declared]:
        if isinstance(kind, str) and kind in _KNOWN:
            yield kind
    if declared is None and ("enum" in schema or "const" in schema):
        chosen = schema.get("enum", [schema.get("const")])
        values = chosen if isinstance(chosen, list) else ()
        yield from (_KINDS[type(value)] for value in values if type(value) in _KINDS)
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice, root, seen, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        held = referenced(root, reference) if isinstance(root, Mapping) else None
        yield from _types(held, root, seen, depth - 1)
    if schema.get("nullable") is True:
        yield "null"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
