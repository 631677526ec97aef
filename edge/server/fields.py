"""A request's JSON, checked field by field. A wrong field raises a Refusal that names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from edge.offload import parse_json
from edge.server.bodies import MOST, Json, plain_schema
from edge.server.refusals import Refusal

_MOST_VALUES = 1 << 20
"""Most values of one body. A prompt of token ids has one value for each token."""

Shape = TypeVar("Shape", bound=msgspec.Struct)


def parse_body(body: bytes) -> Fields:
    """The object in a request's body. Raises Refusal if it is no JSON object."""
    try:
        value = parse_json(body.decode(), most_values=_MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object")
    return Fields(value)


class Fields:
    """An object in a body; `where` is its place. A field that is null counts as absent."""

    def __init__(self, value: Mapping[str, Any], where: str = "") -> None:
        self._value = value
        self._where = where

    def place(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._value.items()

    def raw(self, name: str) -> Any:
        return self._value.get(name)

    def shaped(self, shape: type[Shape]) -> Shape:
        """The fields that this type names. Raises Refusal for a wrong type or range."""
        try:
            try:
                return msgspec.convert(self._value, shape, str_keys=True)
            except msgspec.ValidationError as error:
                if "got `float`" not in str(error):
                    raise
                # Some languages write whole numbers as 20.0.
                return msgspec.convert(_with_whole_numbers(self._value), shape, str_keys=True)
        except msgspec.ValidationError as error:
            raise self._refusal(shape, str(error)) from None
        except UnicodeEncodeError:
            raise Refusal(400, "the body has a name that is half of a pair of UTF-16") from None

    def unlimited(self, *names: str) -> Fields:
        """The object without those of these fields that are -1, "no limit" on other servers."""
        open = {name for name in names if self._value.get(name) == -1}
        return Fields({name: each for name, each in self.items() if name not in open}, self._where)

    def _refusal(self, shape: type[msgspec.Struct], error: str) -> Refusal:
        what, _at, where = error.rpartition(" - at `") if " - at `" in error else (error, "", "")
        place = where.rpartition("$")[2].strip(".`")
        if missing := _MISSING.fullmatch(what):
            return self.refuse(f"{place}.{missing[1]}".lstrip("."), "is missing")
        if where.startswith("key"):
            return self.refuse(place, "has a name that is not the id of a token")
        wanted = _words(_inside(plain_schema(shape), place))
        given = what.removeprefix("Invalid enum value ")
        return self.refuse(place, f"must be {wanted}{f', not {given:.80}' * (given != what)}")

    def text(self, name: str) -> str | None:
        value: str | None = self._of(name, str, "a text")
        return value

    def need_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.refuse(name, "is missing")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._of(name, bool, "true or false"))

    def objects(self, name: str) -> list[Fields]:
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.refuse(name, "must be a list of objects")
        return [Fields(each, f"{self.place(name)}[{i}]") for i, each in enumerate(value)]

    def object(self, name: str) -> Fields | None:
        value = self._of(name, dict, "an object")
        return None if value is None else Fields(value, self.place(name))

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        value = self.need_text(name)
        if value not in choices:
            raise self.refuse(name, f"is one of {', '.join(choices)}, not {value!r:.80}")
        return value

    def refuse(self, name: str, what: str) -> Refusal:
        place = self.place(name)
        return Refusal(400, f"{place} {what}", param=place)

    def _of(self, name: str, kind: type, called: str) -> Any:
        value = self._value.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(name, f"must be {called}")
        return value


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST:
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    return value


_MISSING = re.compile("Object missing required field `(.*)`")


def _inside(schema: Json, place: str) -> Json:
    """The schema of the value at this place."""
    for name in re.findall(r"\w+|\.\.\.", place):
        for each in schema.get("anyOf", [schema]):
            inner = each.get("properties", {}).get(name) or each.get("items")
            schema = inner or each.get("additionalProperties") or schema
    return schema


_KINDS = {
    "integer": ("a whole number", ""),
    "number": ("a number", ""),
    "boolean": ("true or false", ""),
    "string": ("a text", " characters"),
    "array": ("a list", " items"),
    "object": ("an object", ""),
}


def _words(schema: Json) -> str:
    """What a value must be, such as "a whole number, 1 or more"."""
    if "anyOf" in schema:
        return " or ".join(map(_words, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(filter(None, schema['enum']))}"
    limits = {name[:3]: limit for name, limit in schema.items() if name[:3] in {"min", "max"}}
    kind, unit = _KINDS[schema["type"]]
    if not limits:
        return kind
    most = limits.get("max", MOST)
    return f"{kind}, {limits.get('min', 0)} {'or more' if most == MOST else f'to {most}'}{unit}"
