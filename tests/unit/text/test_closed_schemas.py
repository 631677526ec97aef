"""Arguments of calls are those that a tool's schema names, where it does not say otherwise."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from edge.text.closed_schemas import closed

Json = dict[str, Any]
NO_MORE = {"additionalProperties": False}


def of(**properties: Any) -> Json:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (of(a={}), of(a={}) | NO_MORE),
        (of(a=of(b={})), of(a=of(b={}) | NO_MORE) | NO_MORE),
        (of(a={"items": of(b={})}), of(a={"items": of(b={}) | NO_MORE}) | NO_MORE),
        (of(a={"prefixItems": [of(b={})]}), of(a={"prefixItems": [of(b={}) | NO_MORE]}) | NO_MORE),
        ({"anyOf": [of(a={}), {}]}, {"anyOf": [of(a={}) | NO_MORE, {}]}),
        ({"allOf": [of(a={})]}, {"allOf": [of(a={}) | NO_MORE]}),
        (
            {"additionalProperties": of(a={})},
            {"additionalProperties": of(a={}) | NO_MORE},
        ),
        (
            of(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": of(b={})}},
            of(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": of(b={}) | NO_MORE}} | NO_MORE,
        ),
    ],
)  # fmt: skip
def test_objects_take_no_more_than_they_name(schema: Json, wanted: Json) -> None:
    before = repr(schema)
    assert closed(schema) == wanted
    assert repr(schema) == before, "the client's own is as it was"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        of(),
        of(a={"type": "object"}) | {"additionalProperties": True},
        of(a={}) | {"additionalProperties": {"type": "integer"}},
        of(a={}) | {"patternProperties": {"^x": {}}},
        of(a={}) | {"unevaluatedProperties": True},
        of(a={}) | {"required": ["b"]},
        of(a={}) | {"allOf": [of(b={})]},
        of(a={}) | {"anyOf": [of(b={}), of(c={})]},
        {"allOf": [of(a={}), of(b={})]},
        of(a={}) | {"if": of(b={}), "then": of(c={})},
        {"allOf": [{"$ref": "#/$defs/x"}, of(b={})], "$defs": {"x": of(a={})}},
        of(a={}) | {"$ref": "#/$defs/x", "$defs": {"x": of(b={})}},
        {"properties": 5, "anyOf": 5, "items": [5], "required": {}},
        {"properties": {"a": 5}, "required": 5},
    ],
    ids=repr,
)
def test_what_says_more_of_an_object_stays(schema: Json) -> None:
    assert closed(schema) == schema


def test_what_a_closed_one_takes_the_open_one_takes() -> None:
    """And it takes what has only what is named."""
    schema = of(
        where=of(city={"type": "string"}) | {"required": ["city"]},
        tags={"type": "array", "items": {"anyOf": [of(k={}), {"type": "string"}]}},
        env={"type": "object"},
    )
    good = {"where": {"city": "Rom"}, "tags": [{"k": 1}, "x"], "env": {"any": "thing"}}
    for each in (schema, closed(schema)):
        jsonschema.validate(good, each)
    for more in ({"x": 1}, {"where": {"city": "Rom", "x": 1}}, {"tags": [{"x": 1}]}):
        jsonschema.validate(good | more, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | more, closed(schema))


def test_a_schema_without_end_is_left_to_who_checks_it() -> None:
    deep: Json = {}
    for _level in range(5000):
        deep = {"items": deep}
    assert closed(deep)
