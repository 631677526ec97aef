"""Records as JSON and back: one codec for every dataclass, made from its annotations.

What comes from outside is checked against them. Classes with `to_json` and `from_json` of their own
keep to these; ranges and what fields mean together are a record's own to check when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

import partition
from edge.errors import EdgeError, ProtocolError
from transport import TransportError, parse_address
from transport.frame import Buffer

Record = TypeVar("Record")

MALFORMED = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    partition.PlanError, TransportError, EdgeError,
)  # fmt: skip
"""The errors of reading something that nobody wrote."""

_LONGEST_TEXT = 1024
_LARGEST_INTEGER = 1 << 53
_LARGEST_NUMBER = 1e18


@dataclass(frozen=True, slots=True)
class Coded:
    """How a value is written as JSON, and read from it: `read` gets the field's name, too."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


def to_json(record: object) -> Any:
    """Built-in types only."""
    cls: Any = type(record)
    return codec(cls).write(record)


def from_json(cls: type[Record], value: object, name: str = "a record") -> Record:
    """Raises ProtocolError for anything `to_json` could not have written."""
    annotation: Any = cls
    record: Record = codec(annotation).read(value, name)
    return record


def text(value: object, name: str) -> str:
    """1 to 1024 characters. Raises ProtocolError, as all of these do."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
        raise ProtocolError(f"{name} must be a short text, not {value!r:.80}")
    return value


def integer(value: object, name: str) -> int:
    """0 or more."""
    if type(value) is not int or not 0 <= value < _LARGEST_INTEGER:
        raise ProtocolError(f"{name} must be a whole number, not {value!r:.80}")
    return value


def number(value: object, name: str) -> float:
    """0 or more, finite, and no absurd one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"{name} must be a number, not {value!r:.80}")
    if not 0 <= value < _LARGEST_NUMBER:
        raise ProtocolError(f"{name} must be a number of 0 or more, not {value!r:.80}")
    return float(value)


def boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} must be true or false, not {value!r:.80}")
    return value


def printable(value: object, *, limit: int = 200) -> str:
    """What another device says, made safe for a terminal: one line, no control characters."""
    letters = str(value)[:limit]
    return "".join(letter if letter.isprintable() else " " for letter in letters).strip() or "?"


def _address(value: object, name: str) -> str:
    address = text(value, name)
    _made(name, lambda: parse_address(address))
    return address


Printable = Annotated[str, Coded(str, lambda value, name: printable(text(value, name)))]
"""Shown to people."""

Address = Annotated[str, Coded(str, _address)]
"""host:port."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Ids of tokens, as they travel in a payload."""
    return np.asarray(tokens, "<i4").tobytes()


def token_ids(payload: Buffer, vocab_size: int, *, most_tokens: int) -> tuple[int, ...]:
    """Raises ProtocolError for anything `token_bytes` could not have written, or longer."""
    if len(payload) % 4:
        raise ProtocolError("a prompt is whole numbers of 4 bytes")
    if len(payload) > 4 * most_tokens:
        raise ProtocolError("a prompt that is longer than the context")
    tokens = np.frombuffer(payload, "<i4")
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ProtocolError(f"a prompt is ids of a vocabulary of {vocab_size}, at least one")
    return tuple(tokens.tolist())


_PLAIN: dict[Any, Coded] = {
    str: Coded(str, text),
    int: Coded(int, integer),
    float: Coded(float, number),
    bool: Coded(bool, boolean),
}


@cache
def codec(annotation: Any) -> Coded:
    """The codec of a field with this annotation. TypeError for one that no record may hold."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [mark for mark in arguments[1:] if isinstance(mark, Coded)]
        return marks[0] if marks else codec(arguments[0])
    if origin is Literal:
        return Coded(str, lambda value, name: _one_of(arguments, value, name))
    if origin in (Union, UnionType) and NoneType in arguments:
        (held,) = (codec(each) for each in arguments if each is not NoneType)
        return Coded(
            lambda value: None if value is None else held.write(value),
            lambda value, name: None if value is None else held.read(value, name),
        )
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed([codec(each) for each in arguments])
    if origin in (tuple, frozenset):
        return _many(origin, codec(arguments[0]))
    if origin is Mapping:
        return _mapping(arguments[0], codec(arguments[1]))
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if hasattr(annotation, "from_json"):
        return Coded(
            lambda value: value.to_json(),
            lambda value, name: _made(name, lambda: annotation.from_json(value)),
        )
    if dataclasses.is_dataclass(annotation):
        return _record(annotation)
    raise TypeError(f"no record holds {annotation}")


def _one_of(choices: tuple[Any, ...], value: object, name: str) -> object:
    if not isinstance(value, str) or value not in choices:
        raise ProtocolError(f"{name} must be one of {', '.join(choices)}, not {value!r:.80}")
    return value


def _items(value: object, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ProtocolError(f"{name} must be a list, not {value!r:.80}")
    return list(value)


def _fixed(parts: list[Coded]) -> Coded:
    def read(value: object, name: str) -> tuple[Any, ...]:
        items = _items(value, name)
        if len(items) != len(parts):
            raise ProtocolError(f"{name} must be a list of {len(parts)}")
        return tuple(part.read(item, name) for part, item in zip(parts, items, strict=True))

    return Coded(
        lambda value: [part.write(each) for part, each in zip(parts, value, strict=True)], read
    )


def _many(kind: type[Any], item: Coded) -> Coded:
    def write(value: Any) -> list[Any]:
        written = [item.write(each) for each in value]
        return sorted(written) if kind is frozenset else written

    return Coded(
        write, lambda value, name: kind([item.read(each, name) for each in _items(value, name)])
    )


def _mapping(key: Any, held: Coded) -> Coded:
    """An object, or a list of pairs where keys are no text."""
    if key is not str:
        pairs = _many(tuple, _fixed([codec(key), held]))
        return Coded(
            lambda value: pairs.write(value.items()),
            lambda value, name: dict(pairs.read(value, name)),
        )

    def read(value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{name} must be an object, not {value!r:.80}")
        return {text(each, name): held.read(found, name) for each, found in value.items()}

    return Coded(lambda value: {each: held.write(found) for each, found in value.items()}, read)


def _record(cls: Any) -> Coded:
    hints = get_type_hints(cls, include_extras=True)
    parts = {each.name: codec(hints[each.name]) for each in dataclasses.fields(cls)}

    def read(value: object, name: str) -> Any:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{name} must be an object, not {value!r:.80}")
        for each in parts:
            if each not in value:
                raise ProtocolError(f"{name} has no {each}")
        found = {each: part.read(value[each], each) for each, part in parts.items()}
        return _made(name, lambda: cls(**found))

    return Coded(
        lambda value: {each: part.write(getattr(value, each)) for each, part in parts.items()}, read
    )


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except MALFORMED as error:
        raise ProtocolError(f"{name} cannot be: {error}") from error
