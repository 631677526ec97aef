"""Frames: the encoding of the control plane's messages.

Knows the layout and its limits; knows no socket. A frame on the wire is

====================  =====================================================
bytes                 meaning
====================  =====================================================
4, big-endian         size of the header part
4, big-endian         size of the payload
header part           UTF-8 JSON: ``{"kind": text, "header": {...}}``
payload               opaque bytes
====================  =====================================================

Both sizes are compared with the limits before memory is allocated for them: first with those of any
frame, and once the kind is known, with those of the kind.
"""

import json
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from edge.transport.errors import ProtocolError

PROTOCOL_VERSION = 40
"""Raised by one whenever bytes on the wire change their meaning."""

MAX_HEADER_BYTES = 1 << 20
"""Largest header part of a frame: a plan for hundreds of devices fits many times over."""

MAX_PAYLOAD_BYTES = 64 << 20
"""Largest payload of a frame: bulk data (shards of weights) is sent in pieces of at most this."""

MAX_HEADER_CONTAINERS = 1 << 15
"""Most lists and objects in a header: a MiB of empty lists would become 22 MiB in a tenth of a
second."""

MOST_VALUES_BYTES = 8 << 20
"""Limit for the admitted bytes of a header's values. A rare header takes up to twice as much; a
reader that waits for more memory than there is would wait for ever."""

_VALUE_BYTES, _ENTRY_BYTES, _CONTAINER_BYTES = 88, 110, 240
"""The most that CPython takes for a short value with its place in a list, for a key's place in an
object, and for a list or an object: see `value_bytes`."""

Buffer = bytes | bytearray | memoryview

_SIZES = struct.Struct("!II")
PREFIX_BYTES = _SIZES.size
_SMALLEST_HEADER_BYTES = len('{"kind":"k"}')


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: a kind to dispatch on, a small JSON header, and an opaque payload.

    ``header`` holds JSON values only; it arrives with lists where tuples were sent. ``payload``
    arrives as a ``bytearray`` that belongs to the receiver.
    """

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    payload: Buffer = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Size limits of one kind of frame."""

    header_bytes: int = MAX_HEADER_BYTES
    payload_bytes: int = MAX_PAYLOAD_BYTES


LimitsOf = Callable[[str], FrameLimits]
"""The limits of a kind of frame (any text). Called before memory is allocated for the payload."""

Admit = Callable[[int], Awaitable[None]]
"""Awaited until this many bytes may be allocated: for a part of a frame and the record that carries
it, or for a header's values."""


async def admit_all(_num_bytes: int) -> None:
    """For receivers without a limit on all frames together."""


OF_ALL_FRAMES = FrameLimits()


def no_other_limits(_kind: str) -> FrameLimits:
    """The limits of all frames."""
    return OF_ALL_FRAMES


def encode(frame: Frame) -> list[Buffer]:
    """The frame as buffers to be sent one after another; the payload is not copied.

    Raises:
        ProtocolError: the frame has no kind, its header is not JSON, or a part is over its limit.
    """
    if not isinstance(frame.kind, str) or not frame.kind:
        raise ProtocolError("a frame needs a kind: a text that is not empty")
    try:
        document = _ENCODER.encode({"kind": frame.kind, "header": dict(frame.header)}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the header of frame '{frame.kind}' cannot be written as JSON: {error}"
        ) from error
    payload = memoryview(frame.payload)
    _check_sizes(
        len(document), payload.nbytes, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, f"frame '{frame.kind}'"
    )
    head = _SIZES.pack(len(document), payload.nbytes) + document
    if payload.nbytes == 0:
        return [head]
    if not payload.c_contiguous:
        raise ProtocolError(f"the payload of frame '{frame.kind}' is not contiguous: copy it first")
    return [head, payload.cast("B")]


def decode(
    data: Buffer, limits_of: LimitsOf = no_other_limits, *, most: FrameLimits = OF_ALL_FRAMES
) -> Frame:
    """The one frame that ``data`` holds, of any kind within ``most``.

    Raises:
        ProtocolError: ``data`` is not exactly one well-formed frame within its limits.
    """
    assembler = FrameAssembler(
        max_header_bytes=most.header_bytes, max_payload_bytes=most.payload_bytes
    )
    rest = memoryview(data)
    while rest.nbytes:
        space = assembler.wanted()
        part = rest[: space.nbytes]
        space[: part.nbytes] = part
        rest = rest[part.nbytes :]
        frame = assembler.advance(part.nbytes, limits_of)
        if frame is not None:
            if rest.nbytes:
                raise ProtocolError(f"{rest.nbytes} bytes follow the end of the frame")
            return frame
    raise ProtocolError(f"the frame is cut short: it ends after {memoryview(data).nbytes} bytes")


def value_bytes(document: bytes | bytearray) -> int:
    """An upper bound of the memory of a header's values, as long as it is below
    MOST_VALUES_BYTES."""
    containers = document.count(b"[") + document.count(b"{")
    entries = document.count(b":")
    values = 1 + document.count(b",") + entries + containers
    texts = 4 * len(document)  # with a character beyond U+FFFF, each character takes four bytes
    taken = _VALUE_BYTES * values + _ENTRY_BYTES * entries + _CONTAINER_BYTES * containers + texts
    return min(taken, MOST_VALUES_BYTES)


class FrameAssembler:
    """Assembles frames from pieces of any size; touches no socket.

    Ask :meth:`wanted` for the space of the next bytes, fill some of it, and pass their number to
    :meth:`advance`; or to :meth:`put` and then :meth:`read`, to know first how much memory a header
    takes. The space never reaches past the end of the current frame, so nothing after a frame is
    taken from the socket. Received bytes are kept between calls, so a cancelled reader can
    continue. After a ``ProtocolError`` the assembler cannot be used.
    """

    def __init__(
        self,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._max_header_bytes = max_header_bytes
        self._max_payload_bytes = max_payload_bytes
        self._prefix = bytearray(PREFIX_BYTES)
        self._start()

    def _start(self) -> None:
        self._document: bytearray | None = None
        self._is_read = False
        """Whether the header's values were parsed."""
        self._payload: bytearray | None = None
        self._space = memoryview(self._prefix)
        self._due_bytes = 0

    @property
    def due_bytes(self) -> int:
        """Bytes that the next :meth:`wanted` allocates for a part of a frame; 0 if it is
        allocated."""
        return self._due_bytes

    def wanted(self) -> memoryview:
        """The space for the next bytes, never empty."""
        if self._due_bytes:
            part = bytearray(self._due_bytes)
            self._due_bytes = 0
            if self._document is None:
                self._document = part
            else:
                self._payload = part
            self._space = memoryview(part)
        return self._space

    @property
    def unread_bytes(self) -> int:
        """Bytes that the next :meth:`read` allocates for a header's values; 0 if none."""
        if self._document is None or self._space.nbytes or self._due_bytes or self._is_read:
            return 0
        return value_bytes(self._document)

    def advance(self, count: int, limits_of: LimitsOf = no_other_limits) -> Frame | None:
        """:meth:`put`, then :meth:`read`."""
        self.put(count)
        return self.read(limits_of)

    def put(self, count: int, most: FrameLimits = OF_ALL_FRAMES) -> None:
        """Note that ``count`` bytes were put at the start of :meth:`wanted`.

        Raises ``ProtocolError`` for sizes that no frame has, or none within ``most``.
        """
        self._space = self._space[count:]
        if not self._space.nbytes and self._document is None:
            header_bytes, payload_bytes = _SIZES.unpack(self._prefix)
            _check_sizes(
                header_bytes,
                payload_bytes,
                min(self._max_header_bytes, most.header_bytes),
                min(self._max_payload_bytes, most.payload_bytes),
                "the incoming frame",
            )
            self._due_bytes = header_bytes
            self._payload_bytes = payload_bytes

    def read(self, limits_of: LimitsOf = no_other_limits) -> Frame | None:
        """The frame when it is complete. Raises ``ProtocolError`` for anything malformed or over
        its limits."""
        if self._due_bytes or self._space.nbytes or self._document is None:
            return None
        if not self._is_read:
            # Parse the header before the payload is allocated: an invalid frame costs no 64 MiB.
            self._kind, self._header = _decode_document(self._document)
            self._is_read = True
            limits = limits_of(self._kind)
            _check_sizes(
                len(self._document),
                self._payload_bytes,
                limits.header_bytes,
                limits.payload_bytes,
                f"the incoming frame {self._kind[:80]!r}",
            )
            if self._payload_bytes:
                self._due_bytes = self._payload_bytes
                return None
            self._payload = bytearray()
        assert self._payload is not None
        frame = Frame(self._kind, self._header, self._payload)
        self._start()
        return frame


def _check_sizes(
    header_bytes: int, payload_bytes: int, max_header_bytes: int, max_payload_bytes: int, what: str
) -> None:
    if header_bytes < _SMALLEST_HEADER_BYTES:
        raise ProtocolError(f"{what} has a header of {header_bytes} bytes, too small to hold one")
    if header_bytes > max_header_bytes:
        raise ProtocolError(
            f"{what} has a header of {header_bytes} bytes, over the limit of {max_header_bytes}"
        )
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(
            f"{what} has a payload of {payload_bytes} bytes, over the limit of {max_payload_bytes}:"
            " send it in pieces"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# The functions of json make a new one for each call, which takes longer than the call.
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode_document(document: bytearray) -> tuple[str, dict[str, Any]]:
    containers = document.count(b"[") + document.count(b"{")
    if containers > MAX_HEADER_CONTAINERS:
        raise ProtocolError(
            f"the header of the incoming frame has {containers} lists and objects, over the limit "
            f"of {MAX_HEADER_CONTAINERS}"
        )
    try:
        # bytes.decode instead of json's detection, which would also accept UTF-16 and UTF-32.
        decoded = _DECODER.decode(document.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the header of the incoming frame is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ProtocolError("the header of the incoming frame is not a JSON object")
    kind, header = decoded.get("kind"), decoded.get("header", {})
    if not isinstance(kind, str) or not kind:
        raise ProtocolError("the incoming frame names no kind")
    if not isinstance(header, dict):
        raise ProtocolError(f"the header of the incoming frame '{kind[:80]}' is not a JSON object")
    return kind, header
