"""JSON schemas as a grammar can follow them, with the same meaning. Pure.

Generators of schemas write keywords that constrain nothing, and others that a grammar knows under
another name. What remains unknown is refused by the grammar's compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, NAMED

_MOST_DEPTH = 64

_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that the compiler follows. By the standard, any other is an annotation."""

_SAYS_NOTHING = frozenset(
    {"type", "title", "description", "$comment", "$schema", "examples", "minLength"}
)
"""Keywords that leave all names of properties valid, with the type string or a length of 0."""

_LOOKS_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def followed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without keywords that constrain nothing.

    * An unknown `format`, `uniqueItems: false`, and `propertyNames` of any text are dropped.
    * `propertyNames` with a list of names or a pattern become properties, if there are no others.
    * A pattern with lookarounds beside a known format is dropped: a grammar cannot look around, and
      generators write it to describe the format.
    """
    found: Mapping[str, Any] = _followed(schema, 0)
    return found


def _followed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == _MOST_DEPTH:
        return schema
    found = dict(schema)
    if schema.get("uniqueItems") is False:
        del found["uniqueItems"]
    if isinstance(format := schema.get("format"), str):
        if format not in _FORMATS:
            del found["format"]
        elif any(each in str(schema.get("pattern", "")) for each in _LOOKS_AROUND):
            del found["pattern"]
    if "propertyNames" in schema:
        found |= _named(schema)
        if _allows_all(schema["propertyNames"]) or found.get("additionalProperties") is False:
            found.pop("propertyNames", None)
    for key in (*BY_NAME, *NAMED):
        if isinstance(held := found.get(key), Mapping):
            found[key] = {name: _followed(each, depth + 1) for name, each in held.items()}
    for key in (*IN_ORDER, *CHOICES):
        if isinstance(held := found.get(key), list):
            found[key] = [_followed(each, depth + 1) for each in held]
    for key in HELD:
        if key in found:
            found[key] = _followed(found[key], depth + 1)
    return found


def _allows_all(names: object) -> bool:
    if names is True:
        return True
    return (
        isinstance(names, Mapping)
        and names.keys() <= _SAYS_NOTHING
        and names.get("type", "string") == "string"
        and names.get("minLength", 0) == 0
    )


def _named(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`propertyNames` as properties; empty if they cannot be expressed so."""
    names, values = schema["propertyNames"], schema.get("additionalProperties", {})
    if not isinstance(names, Mapping) or {"properties", "patternProperties"} & schema.keys():
        return {}
    says = names.keys() - _SAYS_NOTHING
    if names.get("type", "string") != "string" or "minLength" in names:
        return {}
    if says == {"pattern"} and isinstance(names["pattern"], str):
        return {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    listed = [names.get("const")] if says == {"const"} else names.get("enum")
    if says <= {"const", "enum"} and isinstance(listed, list):
        listed = [each for each in listed if isinstance(each, str)]
        return {"properties": dict.fromkeys(listed, values), "additionalProperties": False}
    return {}
