"""Schemas of arguments whose objects take no more than they name. Pure.

JSON schemas leave objects open where they say nothing, so a model may make up arguments, and a
small one never ends doing so. Who writes a tool's schema means what it names, as OpenAI's strict
mode has it. What a schema says of further properties is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, NAMED

_MOST_DEPTH = 64

_OF_THE_SAME = ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")
"""They say more of the same object, perhaps further properties."""
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


class _Shared(Exception):  # noqa: N818 - not an error
    """A schema that others refer to is a part of what one object is."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, closed where it says nothing: its objects with properties, and those within.

    An object that several schemas speak of together stays as it is, and so does a whole schema
    that makes such objects by references.
    """
    try:
        found: Mapping[str, Any] = _closed(schema, is_shared=False, depth=0)
        return found
    except _Shared:
        return schema


def _closed(schema: Any, *, is_shared: bool, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == _MOST_DEPTH:
        return schema
    found = dict(schema)

    def part(held: Any, *, shared: bool = False) -> Any:
        return _closed(held, is_shared=shared, depth=depth + 1)

    speaking = [key for key in ("properties", *_OF_THE_SAME) if key in schema]
    if "$ref" in schema and (is_shared or len(speaking) > 1):
        raise _Shared
    for key in (*BY_NAME, *NAMED):
        if isinstance(held := schema.get(key), Mapping):
            found[key] = {name: part(each) for name, each in held.items()}
    for key in IN_ORDER:
        if isinstance(held := schema.get(key), list):
            found[key] = [part(each) for each in held]
    for key in HELD:
        if key in schema:
            found[key] = part(schema[key])
    for key in CHOICES:
        if isinstance(held := schema.get(key), list):
            shared = is_shared or len(speaking) > 1 or (key == "allOf" and len(held) > 1)
            found[key] = [part(each, shared=shared) for each in held]
    if not is_shared and speaking == ["properties"] and not any(key in schema for key in _SAYS):
        found |= _no_more(schema["properties"], schema.get("required", []))
    return found


def _no_more(properties: object, required: object) -> Mapping[str, Any]:
    """Nothing for an object of which no property is known, or one that is required is not."""
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not properties:
        return {}
    is_whole = all(each in properties for each in required if isinstance(each, str))
    return {"additionalProperties": False} if is_whole else {}
