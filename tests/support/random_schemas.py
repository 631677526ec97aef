"""Random JSON schemas of what is supported, whose answers are short."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("red", "green", "a b", 'q"uote', "naïve", "back\\slash", "")
_PATTERNS = ("^[a-f]{1,4}$", "^(yes|no)$", "^[0-9]{2}-[A-Z]$")
_FORMATS = ("date", "ipv4", "uuid")


def random_schema(seed: int, *, depth: int = 3) -> dict[str, Any]:
    """The same for the same seed."""
    draw = random.Random(seed)
    schema = _value(draw, depth)
    if draw.random() < 0.3:
        return {"$defs": {"item": _scalar(draw), "whole": schema}, "$ref": "#/$defs/whole"}
    return schema


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or draw.random() < 0.25:
        return _scalar(draw)
    return draw.choice((_object, _object, _array, _any_of))(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = [f"{draw.choice('abcxyz')}{number}" for number in range(draw.randint(1, 4))]
    return {
        "type": "object",
        "properties": {name: _value(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    schema = {"type": "array", "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_scalar(draw), _scalar(draw)]
    return {**schema, "items": _value(draw, depth)}


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(draw, depth), _scalar(draw)]}


def _scalar(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    high = low + draw.randint(0, 2000)
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "integer", "exclusiveMinimum": low, "maximum": high + 1},
        {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": draw.randint(2, 9)},
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 8)},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "string", "format": draw.choice(_FORMATS)},
        {"enum": [*draw.sample(_WORDS, 3), draw.randint(-9, 9), None]},
        {"const": {"is": draw.choice(_WORDS), "n": [draw.randint(0, 9), 0.5]}},
        {"type": ["boolean", "null"]},
    )
    return draw.choice(kinds)
