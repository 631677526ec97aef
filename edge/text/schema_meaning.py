"""JSON schemas as a grammar can follow them, with the same meaning. Pure.

Generators of schemas write keywords that constrain nothing, and others that a grammar knows under
another name. What remains unknown is refused by the grammar's compiler.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, MOST_DEPTH, NAMED
from edge.text.schema_references import with_definitions

_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that the compiler follows. By the standard, any other is an annotation."""

_SAYS_NOTHING = frozenset(
    {"type", "title", "description", "$comment", "$schema", "examples", "minLength"}
)
"""Keywords that leave all names of properties valid, with the type string or a length of 0."""

_MOST_REPEATED_CHARACTERS = 1 << 16
"""Most characters of a schema that is repeated for each name of a property."""

_OF_SETS = frozenset({"items", "uniqueItems", "minItems", "maxItems", "default"})
_MOST_UNLIKE = 5
"""Most possible items of an array without repeats: five have 326 such arrays."""

_SCALARS: Mapping[str, Any] = {"string": str, "boolean": bool}

_LOOKS_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def followed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without keywords that constrain nothing, also of schemas that it references.

    * An unknown `format`, `uniqueItems: false`, and `propertyNames` of any text are dropped.
    * `uniqueItems` of few possible items becomes the list of all such arrays.
    * `propertyNames` with a list of names or a pattern become properties, if there are no others.
    * A pattern with lookarounds beside a known format is dropped: a grammar cannot look around, and
      generators write it to describe the format.
    """
    found: Mapping[str, Any] = _followed(with_definitions(schema), 0)
    return found


def _followed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == MOST_DEPTH:
        return schema
    found = dict(schema)
    if schema.get("uniqueItems") is False:
        del found["uniqueItems"]
    elif schema.get("uniqueItems") is True and (arrays := _unlike_items(schema)) is not None:
        return {"enum": arrays}
    if isinstance(format := schema.get("format"), str):
        if format not in _FORMATS:
            del found["format"]
        elif isinstance(pattern := schema.get("pattern"), str) and _looks_around(pattern):
            del found["pattern"]
    for key in (*BY_NAME, *NAMED):
        if isinstance(held := found.get(key), Mapping):
            found[key] = {name: _followed(each, depth + 1) for name, each in held.items()}
    for key in (*IN_ORDER, *CHOICES):
        if isinstance(held := found.get(key), list):
            found[key] = [_followed(each, depth + 1) for each in held]
    if isinstance(held := found.get("items"), list):
        found["items"] = [_followed(each, depth + 1) for each in held]
    for key in HELD:
        if key in found:
            found[key] = _followed(found[key], depth + 1)
    if "propertyNames" in schema:  # last: what it repeats is rewritten already
        named = {} if _allows_all(schema["propertyNames"]) else _named(found)
        if named or _allows_all(schema["propertyNames"]):
            del found["propertyNames"]
            found |= named
    return found


def _unlike_items(schema: Mapping[str, Any]) -> list[list[Any]] | None:
    """All arrays of the schema without an item twice; None: there are too many."""
    items = schema.get("items")
    if not isinstance(items, Mapping) or not schema.keys() <= _OF_SETS | _SAYS_NOTHING:
        return None
    kind = items.get("type")
    values = items.get("enum", [False, True] if kind == "boolean" else None)
    least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_UNLIKE)
    if (
        schema.get("type", "array") != "array"
        or not items.keys() <= {"enum", *_SAYS_NOTHING}
        or not isinstance(values, list)
        or len(values) > _MOST_UNLIKE
        or not all(isinstance(each, _SCALARS.get(str(kind), str | bool | None)) for each in values)
        or not type(least) is type(most) is int
    ):
        return None
    lengths = range(max(0, least), min(most, len(values)) + 1)
    unlike = dict.fromkeys(values)
    return [list(each) for count in lengths for each in itertools.permutations(unlike, count)]


def _looks_around(pattern: str) -> bool:
    plain = re.sub(r"\\.", "", pattern, flags=re.DOTALL)
    return any(each in plain for each in _LOOKS_AROUND)


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
    if names.get("type", "string") != "string":
        return {}
    if not says and type(least := names.get("minLength")) is int:
        pattern = f"^[\\s\\S]{{{least},}}$"
        return {"patternProperties": {pattern: values}, "additionalProperties": False}
    if "minLength" in names or len(says) > 1:
        return {}
    if says == {"pattern"} and isinstance(names["pattern"], str):
        return {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    listed = [names.get("const")] if says == {"const"} else names.get("enum")
    if says <= {"const", "enum"} and isinstance(listed, list):
        texts = [each for each in listed if isinstance(each, str)]
        if len(texts) * len(str(values)) <= _MOST_REPEATED_CHARACTERS:
            return {"properties": dict.fromkeys(texts, values), "additionalProperties": False}
        pattern = f"^(?:{'|'.join(map(re.escape, texts))})$"
        return {"patternProperties": {pattern: values}, "additionalProperties": False}
    return {}
