"""References inside JSON schemas, by JSON pointers (RFC 6901). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from edge.text.schema_keywords import BY_NAME, CHOICES, HELD, IN_ORDER, MOST_DEPTH, NAMED

_MOST_SCHEMAS = 1 << 16
"""Most nested schemas that are read; a place inside another one is read with both."""


class _TooMany(Exception):  # noqa: N818 - not an error
    """Raised if there are more."""


def referenced(root: Mapping[str, Any], reference: object) -> Any:
    """What a reference like "#/components/schemas/x" names; None: nothing inside `root`."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name in map(str, range(len(found))):
            found = found[int(name)]
        else:
            return None
    return found


def with_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with every schema that is referenced among its definitions.

    References may name any place, as `#/components/schemas/x` in OpenAPI. What rewrites schemas,
    and what finds faults in them, looks at known keywords alone. A schema that would become too
    large is returned as it is.
    """
    if not isinstance(schema.get("$defs", {}), Mapping):
        return schema
    moving = _Moving(schema)
    try:
        found = moving.followed(schema, 0)
        while moving.waiting:
            name, held = moving.waiting.popitem()
            moving.definitions[name] = moving.followed(held, 0)
    except _TooMany:
        return schema
    if moving.definitions:
        found["$defs"] = {**found.get("$defs", {}), **moving.definitions}
    return dict(found)


class _Moving:
    """The schemas that are moved to the definitions of `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        """Schemas whose own references have not been followed, by their new names."""
        self._root = root
        self._left = _MOST_SCHEMAS
        self._names: dict[str, str] = {}
        """By reference."""

    def followed(self, schema: Any, depth: int) -> Any:
        """The schema with references to definitions only."""
        if not isinstance(schema, Mapping) or depth == MOST_DEPTH:
            return schema
        self._left -= 1
        if self._left < 0:
            raise _TooMany
        found = dict(schema)
        if isinstance(reference := schema.get("$ref"), str):
            found["$ref"] = self._moved(reference)
        for key in (*BY_NAME, *NAMED):
            if isinstance(held := schema.get(key), Mapping):
                found[key] = {name: self.followed(each, depth + 1) for name, each in held.items()}
        for key in (*IN_ORDER, *CHOICES, *HELD):
            if isinstance(held := schema.get(key), list):
                found[key] = [self.followed(each, depth + 1) for each in held]
            elif key in HELD and key in schema:
                found[key] = self.followed(held, depth + 1)
        return found

    def _moved(self, reference: str) -> str:
        if reference not in self._names:
            held = referenced(self._root, reference)
            kind, _, rest = reference.removeprefix("#/").partition("/")
            if not isinstance(held, Mapping | bool) or (kind in NAMED and "/" not in rest):
                return reference
            name = unquote(reference[2:])
            taken = {*self._root.get("$defs", {}), *self._names.values()}
            while name in taken:
                name += "'"
            self._names[reference] = name
            self.waiting[name] = held
        name = self._names[reference].replace("~", "~0").replace("/", "~1")
        return f"#/$defs/{quote(name, safe='~')}"
