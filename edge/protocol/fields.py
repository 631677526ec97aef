"""Records as JSON and back. Values from outside are read by the annotations of their dataclass.

Plain types have limits here; `Meta` in an annotation sets another limit. Classes with their own
`to_json` and `from_json` use those. Rules between several fields are checked by the record itself
when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)  # fmt: skip

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from numpy.typing import NDArray

from edge import partition
from edge.errors import EdgeError, ProtocolError, shown
from edge.models.pictures import PICTURE_IDS
from edge.offload import StoreError
from edge.transport import TransportError, parse_number
from edge.transport.frame import Buffer

Record = TypeVar("Record")

MALFORMED = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    partition.PlanError, TransportError, StoreError, EdgeError,
)  # fmt: skip
"""The errors of reading malformed values."""

Text = Annotated[str, Meta(min_length=1, max_length=1024)]
Whole = Annotated[int, Meta(ge=0, lt=1 << 53)]
Number = Annotated[float, Meta(ge=0, lt=1e18)]
Positive = Annotated[float, Meta(gt=0, lt=1e18)]

_PLAIN: Mapping[Any, Any] = {str: Text, int: Whole, float: Number, bool: bool, NoneType: None}
"""Types with limits, for annotations without limits of their own."""

_MOST_ITEMS = Meta(max_length=4096)
"""The most items of a list or an object without a limit of its own: tokens of a chunk, layers of a
model."""

Reader = Callable[[Any], Any]
"""Converts a JSON value. Raises one of `MALFORMED`."""


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Marks a field that has a reader of its own."""

    reader: Reader


def to_json(value: Any) -> Any:
    """The value as built-in types. A mapping becomes an object, or a list of pairs where its keys
    are not strings."""
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
    raise TypeError(f"a record cannot hold {shown(value)}")


def from_json(cls: type[Record], value: object) -> Record:
    """A record from JSON. Raises ProtocolError, with the place of the mistake, for values that
    `to_json` cannot make."""
    annotation: Any = cls
    try:
        record: Record = convert(value, shape(annotation))
        return record
    except MALFORMED as error:
        raise ProtocolError(located(error)) from error


def one_line(value: object, *, limit: int = 200) -> str:
    """Text from another device made safe for a terminal: one line, no control characters."""
    letters = str(value)[:limit]
    return "".join(letter if letter.isprintable() else " " for letter in letters).strip() or "?"


def _address(value: object) -> str:
    address = from_json(str, value)
    parse_number(address)
    return address


Printable = Annotated[str, ReadBy(lambda value: one_line(from_json(str, value)))]
"""Text that is shown to users."""

Address = Annotated[str, ReadBy(_address)]
"""host:port with a numeric host. Resolving names from another device would let it choose which
hosts are asked."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as the bytes of a payload."""
    return np.asarray(tokens, "<i8").tobytes()


def token_ids(payload: Buffer, vocab_size: int, *, most_tokens: int) -> NDArray[np.int64]:
    """Token ids from a payload, [tokens] int64, without a copy. As Python integers they would take
    several times the memory.

    Raises ProtocolError for a payload that `token_bytes` cannot make, ids that are neither of the
    vocabulary nor of a picture's rows, or more than `most_tokens`.
    """
    if len(payload) % 8:
        raise ProtocolError(f"a prompt of {len(payload)} bytes is no whole number of token ids")
    if len(payload) > 8 * most_tokens:
        raise ProtocolError(f"a prompt of {len(payload) // 8} tokens, of at most {most_tokens}")
    tokens = np.frombuffer(payload, "<i8")
    are_tokens = (tokens >= 0) & (tokens < vocab_size)
    are_rows = (tokens >= PICTURE_IDS) & (tokens < 2 * PICTURE_IDS)
    if not tokens.size or not (are_tokens | are_rows).all():
        raise ProtocolError(f"a prompt needs at least one token id, all of them below {vocab_size}")
    return tokens


@cache
def shape(annotation: Any, limit: Meta = _MOST_ITEMS) -> Any:
    """The type by which msgspec reads a field with this annotation: with the limits of plain types,
    and a `_Held` for each record.

    TypeError for an annotation that no record may have.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        held, mark, *_others = arguments
        if isinstance(mark, ReadBy):
            return _held(mark.reader)
        return Annotated[held, mark] if held in _PLAIN else shape(held, mark)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Literal:
        return annotation
    if origin in (Union, UnionType):
        return Union[tuple(map(shape, arguments))]  # noqa: UP007 - of types that are computed
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple[tuple(map(shape, arguments))]  # type: ignore[misc]
    if origin in (tuple, frozenset):
        item = (shape(arguments[0]), ...) if origin is tuple else shape(arguments[0])
        return Annotated[origin[item], limit]
    if origin is Mapping and arguments[0] is str:
        item = shape(arguments[1])
        return Annotated[dict[Text, item], limit]  # type: ignore[valid-type]
    if origin is Mapping:
        pairs = shape(tuple[tuple[arguments], ...], limit)  # type: ignore[valid-type]
        return _held(lambda value: dict(convert(value, pairs)))
    if hasattr(annotation, "from_json"):
        return _held(annotation.from_json)
    if dataclasses.is_dataclass(annotation):
        return _record(annotation)
    raise TypeError(f"a record cannot hold {annotation}")


def _record(cls: Any) -> Any:
    """The dataclass itself, for msgspec to read, if it states all limits and has no defaults."""
    has_defaults = any(
        each.default is not MISSING or each.default_factory is not MISSING
        for each in dataclasses.fields(cls)
    )
    fields = fields_of(cls)
    if not has_defaults and get_type_hints(cls, include_extras=True) == get_type_hints(
        fields, include_extras=True
    ):
        return cls
    return _held(lambda value: cls(**asdict(convert(value, fields))))


def fields_of(cls: Any, without: Collection[str] = ()) -> type[msgspec.Struct]:
    """The type of an object with the fields of a dataclass, all of them required."""
    hints = get_type_hints(cls, include_extras=True)
    names = [each.name for each in dataclasses.fields(cls) if each.name not in without]
    return msgspec.defstruct(cls.__name__, [(name, shape(hints[name])) for name in names])


class _Held(type):
    """A type that msgspec leaves to a reader of ours. Any result of the reader counts as an
    instance."""

    read: Reader

    def __instancecheck__(cls, _value: object) -> bool:
        return True


def _held(read: Reader) -> _Held:
    return _Held("Held", (), {"read": staticmethod(read)})


def _read(kind: Any, value: object) -> Any:
    try:
        return kind.read(value)
    except MALFORMED as error:  # msgspec adds the place only to errors of this type
        raise ValueError(str(error)) from error


convert = partial(msgspec.convert, dec_hook=_read)
"""Raises one of `MALFORMED`; `located` makes its sentence readable."""

_LONGEST_SENTENCE = 200


def located(error: Exception) -> str:
    """The sentence of an error of `convert`, with the place of the mistake before it."""
    what, *within = str(error).split(" - at `$")
    place = "".join(each.rstrip("`") for each in reversed(within)).lstrip(".")
    return f"{place}: {what:.{_LONGEST_SENTENCE}}" if place else what[:_LONGEST_SENTENCE]
