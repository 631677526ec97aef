"""A client's JSON, checked field by field: what is not as it must be is a Refusal that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.offload import parse_json
from edge.server.refusals import Refusal

_MOST_VALUES = 1 << 20
"""Most values of one body: a prompt of token ids has one for each."""
_MOST = 1 << 53
"""Largest whole number: all up to it are exact wherever JSON is read."""


def parse_body(body: bytes) -> Fields:
    """Raises Refusal for what is no JSON object."""
    try:
        value = parse_json(body.decode(), most_values=_MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body must be a JSON object")
    return Fields(value)


class Fields:
    """An object of a body; `where` is its place there. null is as good as nothing."""

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

    def whole(self, name: str, *, least: int, most: int = _MOST) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            upper = f" to {most}" if most != _MOST else " or more"
            raise self.refuse(name, f"must be a whole number, {least}{upper}")
        return value

    def number(self, name: str, *, least: float, most: float) -> float | None:
        value = self._value.get(name)
        if value is None:
            return None
        if type(value) not in {int, float} or not least <= value <= most:
            raise self.refuse(name, f"must be a number, {least:g} to {most:g}")
        return float(value)

    def texts(self, name: str, *, most: int) -> tuple[str, ...]:
        """One text, or a list of them."""
        value = self._value.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise self.refuse(name, "must be a text or a list of texts, none of them empty")
        if len(values) > most:
            raise self.refuse(name, f"has {len(values)} texts, and {most} are the most")
        return tuple(values)

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
