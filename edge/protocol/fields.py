"""Records as JSON and back: what comes from outside is read by the annotations of its dataclass.

Classes with `to_json` and `from_json` of their own keep to these; ranges and what fields mean
together are a record's own to check when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from edge import partition
from edge.errors import EdgeError, ProtocolError, shown
from edge.offload import StoreError
from edge.transport import TransportError, parse_number
from edge.transport.frame import Buffer

Record = TypeVar("Record")

MALFORMED = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    partition.PlanError, TransportError, StoreError, EdgeError,
)  # fmt: skip
"""The errors of reading something that nobody wrote."""

_LONGEST_TEXT = 1024
_LARGEST_INTEGER = 1 << 53
_MOST_ITEMS = 4096
"""Items of a list or an object that is not marked otherwise: tokens of a chunk, layers of a
model."""
_LARGEST_NUMBER = 1e18


Reader = Callable[[Any, str], Any]
"""Makes a value of JSON; gets the field's name, too, for its ProtocolError."""


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Marks a field that has a reader of its own."""

    reader: Reader


@dataclass(frozen=True, slots=True)
class AtMost:
    """Marks a list or an object whose limit is another than that of most."""

    items: int


def to_json(value: Any) -> Any:
    """Built-in types only. A mapping is an object, or a list of pairs where keys are no text."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(held) for key, held in value.items()}
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        return [to_json(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(map(to_json, value))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"no record holds {shown(value)}")


def from_json(cls: type[Record], value: object) -> Record:
    """Raises ProtocolError for anything `to_json` could not have written."""
    annotation: Any = cls
    record: Record = reader(annotation)(value, "a record")
    return record


def text(value: object, name: str) -> str:
    """1 to 1024 characters. Raises ProtocolError, as all of these do."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
        raise ProtocolError(f"{name} must be a short text, not {shown(value)}")
    return value


def integer(value: object, name: str) -> int:
    """0 or more."""
    if type(value) is not int or not 0 <= value < _LARGEST_INTEGER:
        raise ProtocolError(f"{name} must be a whole number, not {shown(value)}")
    return value


def number(value: object, name: str) -> float:
    """0 or more, finite, and no absurd one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"{name} must be a number, not {shown(value)}")
    if not 0 <= value < _LARGEST_NUMBER:
        raise ProtocolError(f"{name} must be a number of 0 or more, not {shown(value)}")
    return float(value)


def boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} must be true or false, not {shown(value)}")
    return value


def printable(value: object, *, limit: int = 200) -> str:
    """What another device says, made safe for a terminal: one line, no control characters."""
    letters = str(value)[:limit]
    return "".join(letter if letter.isprintable() else " " for letter in letters).strip() or "?"


def _address(value: object, name: str) -> str:
    address = text(value, name)
    _made(name, lambda: parse_number(address))
    return address


Printable = Annotated[str, ReadBy(lambda value, name: printable(text(value, name)))]
"""Shown to people."""

Address = Annotated[str, ReadBy(_address)]
"""host:port, by number: who is told names would ask for them whomever the teller likes."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Ids of tokens, as they travel in a payload."""
    return np.asarray(tokens, "<i4").tobytes()


def token_ids(payload: Buffer, vocab_size: int, *, most_tokens: int) -> NDArray[np.int32]:
    """In the payload's memory: as Python's numbers they would take nine times as much.

    Raises ProtocolError for anything `token_bytes` could not have written, or longer.
    """
    if len(payload) % 4:
        raise ProtocolError("a prompt is whole numbers of 4 bytes")
    if len(payload) > 4 * most_tokens:
        raise ProtocolError("a prompt that is longer than the context")
    tokens = np.frombuffer(payload, "<i4")
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ProtocolError(f"a prompt is ids of a vocabulary of {vocab_size}, at least one")
    return tokens


_PLAIN: dict[Any, Reader] = {str: text, int: integer, float: number, bool: boolean}


@cache
def reader(annotation: Any, most: int = _MOST_ITEMS) -> Reader:
    """The reader of a field with this annotation, of at most `most` items.

    TypeError for one that no record may hold.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for mark in arguments[1:]:
            if isinstance(mark, ReadBy):
                return mark.reader
            if isinstance(mark, AtMost):
                return reader(arguments[0], mark.items)
        return reader(arguments[0])
    if origin is Literal:
        return partial(_one_of, arguments)
    if origin in (Union, UnionType) and NoneType in arguments:
        (held,) = (reader(each) for each in arguments if each is not NoneType)
        return lambda value, name: None if value is None else held(value, name)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return partial(_fixed, [reader(each) for each in arguments])
    if origin in (tuple, frozenset):
        item = reader(arguments[0])
        return lambda value, name: origin([item(each, name) for each in _items(value, name, most)])
    if origin is Mapping and arguments[0] is str:
        item = reader(arguments[1])
        return lambda value, name: {
            text(key, name): item(held, name) for key, held in _object(value, name, most).items()
        }
    if origin is Mapping:
        pairs = reader(tuple[tuple[arguments], ...], most)  # type: ignore[valid-type]
        return lambda value, name: dict(pairs(value, name))
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if hasattr(annotation, "from_json"):
        return lambda value, name: _made(name, lambda: annotation.from_json(value))
    if dataclasses.is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        fields = [each.name for each in dataclasses.fields(annotation)]
        return partial(_record, annotation, {each: reader(hints[each]) for each in fields})
    raise TypeError(f"no record holds {annotation}")


def _one_of(choices: tuple[Any, ...], value: object, name: str) -> object:
    if not isinstance(value, str) or value not in choices:
        raise ProtocolError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return value


def _items(value: object, name: str, most: int = _MOST_ITEMS) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ProtocolError(f"{name} must be a list, not {shown(value)}")
    if len(value) > most:
        raise ProtocolError(f"{name} has {len(value)} items, and {most} is the most")
    return list(value)


def _object(value: object, name: str, most: int = _MOST_ITEMS) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name} must be an object, not {shown(value)}")
    if len(value) > most:
        raise ProtocolError(f"{name} has {len(value)} items, and {most} is the most")
    return value


def _fixed(parts: list[Reader], value: object, name: str) -> tuple[Any, ...]:
    items = _items(value, name)
    if len(items) != len(parts):
        raise ProtocolError(f"{name} must be a list of {len(parts)}")
    return tuple(part(item, name) for part, item in zip(parts, items, strict=True))


def _record(cls: Any, parts: Mapping[str, Reader], value: object, name: str) -> Any:
    given = _object(value, name)
    for each in parts:
        if each not in given:
            raise ProtocolError(f"{name} has no {each}")
    found = {each: part(given[each], each) for each, part in parts.items()}
    return _made(name, lambda: cls(**found))


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except MALFORMED as error:
        raise ProtocolError(f"{name} cannot be: {error}") from error
