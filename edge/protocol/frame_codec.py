"""Frames: calls with an answer, posts without one, and events from a peer.

A frame is a dataclass. Its fields are the frame's header, except for those marked with `Payload`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from msgspec.structs import asdict

from edge.errors import ProtocolError
from edge.protocol.fields import MALFORMED, convert, fields_of, located, shape, to_json
from edge.transport import Frame
from edge.transport.frame import MAX_HEADER_BYTES, Buffer, FrameLimits

ANSWER = "ok"
"""The kind of every answer. The call that it answers determines its fields."""

SMALL = FrameLimits(header_bytes=64 << 10, payload_bytes=64 << 10)
"""Size limit of most kinds of frames, and of unknown kinds, which get an error as an answer."""

LARGE_HEADER = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=SMALL.payload_bytes)
"""Size limit of a plan for hundreds of devices, or of a step of a thousand requests with their
terms."""

MOST_COPY_BYTES = 1 << 20
"""Largest copy of keys and values. Tokens chosen meanwhile wait until it is sent."""

_MOST_CONTAINERS = 1000

Answer_co = TypeVar("Answer_co", covariant=True)
Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Payload:
    """Marks the one field of a frame that is too large for its header."""

    write: Callable[[Any], Buffer]
    read: Callable[[Buffer], Any]


Raw = Annotated[Buffer, Payload(lambda value: value, lambda payload: payload)]
"""Bytes without conversion."""


def long_json(annotation: Any) -> Payload:
    """A payload with such a value as JSON, with a limited number of lists and objects."""
    held = shape(annotation)

    def read(payload: Buffer) -> Any:
        text = bytes(payload)
        if text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS:
            raise ProtocolError("the payload has more lists and objects than such a value")
        return convert(json.loads(text), held)

    return Payload(lambda value: json.dumps(to_json(value)).encode(), read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer_co]):
    """A frame from the coordinator that the peer answers, or refuses with the reason."""

    kind: ClassVar[str]
    limits: ClassVar[FrameLimits] = SMALL
    limit_s: ClassVar[float]
    """The time limit of the answer. A peer that falls silent is noticed before."""

    @classmethod
    def answer(cls) -> type[Answer_co]:
        """The type of the answer."""
        bases = cls.__orig_bases__  # type: ignore[attr-defined]
        (answer,) = (get_args(each)[0] for each in bases if get_origin(each) is Call)
        record: type[Answer_co] = answer
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The empty answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A frame from the coordinator without an answer. An error is reported by `failed`."""

    kind: ClassVar[str]
    limits: ClassVar[FrameLimits] = SMALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A frame from a peer that answers no call."""

    kind: ClassVar[str]
    limits: ClassVar[FrameLimits] = SMALL


FrameType = type[Call[Any]] | type[Post] | type[Event]


def table(types: Iterable[FrameType]) -> dict[str, FrameType]:
    """The types by their kinds."""
    return {each.kind: each for each in types}


def to_frame(kind: str, body: object, *, call: int | None = None) -> Frame:
    """A frame with these fields. call: the number of a call, or of the call that it answers."""
    header: dict[str, Any] = {} if call is None else {"call": call}
    payload: Buffer = b""
    cls: Any = type(body)
    payloads, names, _header = _parts(cls)
    for name, part in payloads.items():
        payload = part.write(getattr(body, name))
    for name in names:
        header[name] = to_json(getattr(body, name))
    return Frame(kind, header, payload)


def from_frame(cls: type[Body], frame: Frame) -> Body:
    """A record from a frame. Raises ProtocolError for frames that `to_frame` cannot make."""
    hashed: Any = cls
    payloads, _names, header = _parts(hashed)
    try:
        found = asdict(convert(frame.header, header))
        for name, part in payloads.items():
            found[name] = part.read(frame.payload)
        return cls(**found)
    except MALFORMED as error:
        raise ProtocolError(f"a malformed {frame.kind[:80]!r}: {located(error)}") from error


@cache
def _parts(cls: type[Any]) -> tuple[Mapping[str, Payload], Sequence[str], Any]:
    """The payload, the names of the other fields, and their type."""
    hints = get_type_hints(cls, include_extras=True)
    payloads = {
        name: mark
        for name, hint in hints.items()
        for mark in get_args(hint)[1:]
        if isinstance(mark, Payload)
    }
    names = [each.name for each in dataclasses.fields(cls) if each.name not in payloads]
    return payloads, names, fields_of(cls, without=payloads)
