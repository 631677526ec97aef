"""Closed schemas of arguments, whose objects have only the named properties. Pure.

By default a JSON schema allows further properties, so a model may make up arguments, and a small
model may do so without end. A tool's schema means only the named ones, as in OpenAI's strict mode.
An explicit additionalProperties is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, MOST_DEPTH, NAMED
from edge.text.schema_references import with_definitions

_OF_THE_SAME = ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")
"""Keywords with further schemas of the same object, which may name properties."""
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


class _Shared(Exception):  # noqa: N818 - not an error
    """Raised if a referenced schema is part of the description of an object."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with its objects closed, nested ones included, if they have properties.

    An object that several schemas describe together is not changed, nor a whole schema with such
    objects by reference.
    """
    try:
        found: Mapping[str, Any] = _closed(with_definitions(schema), is_shared=False, depth=0)
        return found
    except _Shared:
        return schema


def _closed(schema: Any, *, is_shared: bool, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth == MOST_DEPTH:
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
    """The keyword that closes an object; empty if no property is named, or a required one is
    not."""
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not properties:
        return {}
    is_whole = all(each in properties for each in required if isinstance(each, str))
    return {"additionalProperties": False} if is_whole else {}
