"""References by JSON pointers to any place of a schema."""

from __future__ import annotations

from typing import Any

import pytest

from edge.text.closed_schemas import closed
from edge.text.grammar import _check
from edge.text.schema_meaning import followed
from edge.text.schema_references import referenced, with_definitions

Json = dict[str, Any]

ODD = {"type": "string", "format": "of-our-own"}
"""A schema that a grammar takes only once it is rewritten."""

PLACES: dict[str, Json] = {
    "components": {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": ODD}}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": ODD}},
    "a property": {"properties": {"a": ODD, "b": {"$ref": "#/properties/a"}}},
    "a choice": {
        "properties": {"a": {"anyOf": [{}, ODD]}, "b": {"$ref": "#/properties/a/anyOf/1"}}
    },
    "escaped": {"$ref": "#/x/a~1b%20c~0", "x": {"a/b c~": ODD}},
    "a chain": {
        "$ref": "#/x/a",
        "x": {"a": {"properties": {"p": {"$ref": "#/y/0"}}}},
        "y": [ODD],
    },
    "itself": {
        "properties": {"next": {"$ref": "#/x/a"}},
        "x": {"a": {"properties": {"next": {"$ref": "#/x/a"}, "v": ODD}}},
    },
    "inside a definition": {
        "$ref": "#/$defs/a/properties/p",
        "$defs": {"a": {"properties": {"p": ODD}}},
    },
    "what is rewritten": {
        "properties": {
            "a": {"uniqueItems": True, "items": {"enum": ["x", "y"]}},
            "b": {"$ref": "#/properties/a/items"},
        }
    },
}


@pytest.mark.parametrize("name", PLACES)
def test_a_schema_in_any_place_is_followed(name: str) -> None:
    schema = PLACES[name]
    before = repr(schema)
    assert not _check(followed(schema))
    assert repr(schema) == before, "the client's own is as it was"


def test_what_is_referenced_keeps_its_meaning() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/components/schemas/a"}},
        "components": {"schemas": {"a": {"enum": ["x"]}}},
        "$defs": {"components/schemas/a": {"enum": ["another"]}},
    }
    found = with_definitions(schema)
    reference = found["properties"]["a"]["$ref"]
    assert referenced(found, reference) == {"enum": ["x"]}
    assert found["$defs"]["components/schemas/a"] == {"enum": ["another"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$ref": "#/components/none"},
        {"$ref": "#/x/y/1", "x": {"y": [1]}},
        {"$ref": "#/x/01", "x": [{}, {}]},
        {"$ref": "other.json#/x"},
        {"$ref": 5},
        {"properties": {"$ref": {"type": "string"}}},
        {"const": {"$ref": "#/x"}, "x": {}},
        {"$ref": "#/x", "x": {}, "$defs": 5},
    ],
    ids=repr,
)
def test_what_is_no_such_reference_stays(schema: Json) -> None:
    assert with_definitions(schema) == schema


def test_arguments_by_reference_are_those_that_are_named() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/components/schemas/a"}},
        "components": {"schemas": {"a": {"type": "object", "properties": {"b": {}}}}},
    }
    found = closed(parameters)
    assert found["additionalProperties"] is False
    held = referenced(found, found["properties"]["a"]["$ref"])
    assert held["additionalProperties"] is False


def test_places_inside_each_other_are_held_once_each_and_not_without_end() -> None:
    pointers = ["#" + "/items" * level for level in range(1, 41)]
    for size, is_moved in ((20, True), (2000, False)):
        deep: Json = {"properties": {f"p{n}": {} for n in range(size)}}
        for _ in pointers:
            deep = {"items": deep}
        schema = {**deep, "properties": {f"p{n}": {"$ref": pointers[n % 40]} for n in range(400)}}
        found = with_definitions(schema)
        assert len(found.get("$defs", ())) == (40 if is_moved else 0)
        assert (found == schema) is not is_moved
