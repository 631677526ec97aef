"""The untrusted header of a GGUF file: its metadata and the places of its tensors.

Every count and length is compared with the rest of the file, and with a fixed limit, before memory
is allocated for it.

Layout: "GGUF", version (uint32), number of tensors and of metadata entries (uint64), the entries
(key, type, value), then for each tensor its name, dimensions (the innermost first), type and
offset; all little-endian.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.files.bounded_json import collector_paused
from edge.offload.files.gguf_types import BLOCK_TYPES, READ_TYPES, BlockType

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20
"""Most bytes of a header. Vocabularies of 260,000 tokens with 515,000 merges take 20 MB."""
MAX_STRINGS = 2 << 20
"""Most strings in all arrays of one file."""
MAX_ARRAY = 1 << 20
"""Most values of one array."""
_MAX_KEYS = 4096  # files have 20 to 60
_MAX_TENSORS = 100_000
_MAX_KEY_BYTES = 255
_MAX_NAME_BYTES = 255  # ggml's own limit is 64
_MAX_AXES = 4
_MAX_SIZE = 1 << 48
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_FIRST_PART_BYTES = 1 << 20

Value = bool | int | float | str | tuple[str, ...] | NDArray[Any]
"""A value of metadata. Arrays of numbers are numpy's, arrays of strings tuples."""

_NUMBERS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class HeaderError(Exception):
    """A fault of a header and its remedy, as the end of a sentence that names the file."""

    def __init__(self, cause: str, remedy: str = "download the file again") -> None:
        super().__init__(f"{cause}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's type, its shape as numpy writes it, and its bytes from the start of the file."""

    type: BlockType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    nbytes: int


ReadAt = Callable[[int, int], bytes]
"""read_at(offset, count) gives exactly these bytes, which must be within the file."""


def read_header(read_at: ReadAt, size: int) -> GgufHeader:
    """The header of a file of `size` bytes. Raises HeaderError."""
    cursor = _Cursor(read_at, size)
    if size < 4 or cursor.take(4) != MAGIC:
        raise HeaderError("does not begin with GGUF, as every GGUF file does")
    version = cursor.number("<I")
    if version not in (2, 3):
        if version in (2 << 24, 3 << 24):
            raise HeaderError("is in big-endian order", "fetch the little-endian file")
        remedy = "convert the model again, with a newer program"
        raise HeaderError(f"is GGUF of version {version}, and 2 and 3 are read", remedy)
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    cursor.check_count(num_keys, 8 + 4 + 1, _MAX_KEYS, "metadata entries")
    cursor.check_count(num_tensors, 8 + 4 + 8 + 4 + 8, _MAX_TENSORS, "tensors")
    with collector_paused():
        metadata = _read_metadata(cursor, num_keys)
        tensors = _read_tensors(cursor, num_tensors, _alignment(metadata))
    return GgufHeader(metadata=metadata, tensors=tensors, nbytes=cursor.position)


class _Cursor:
    """Reads the header from its start, in growing parts of the file."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self.size = size
        self._most = min(size, MAX_HEADER_BYTES)
        self._data = b""
        self.position = 0
        self.strings = 0
        """Strings in arrays so far."""

    def check_count(self, count: int, least_bytes: int, most: int, what: str) -> None:
        """Raises HeaderError if `count` items of at least `least_bytes` cannot be in the file."""
        if count > most:
            raise HeaderError(
                f"announces {count:,} {what}, and {most:,} are the most that are read"
            )
        if count * least_bytes > self.size - self.position:
            raise HeaderError(f"announces {count:,} {what}, for which it is too short")

    def take(self, count: int) -> bytes:
        """The next bytes. Raises HeaderError beyond the end of the file or the limit."""
        begin, end = self.position, self.position + count
        if end > len(self._data):
            self._grow(end)
        self.position = end
        return self._data[begin:end]

    def number(self, code: str) -> int:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(value)

    def string(self, most: int, what: str) -> str:
        length = self.number("<Q")
        if length > most:
            raise HeaderError(f"has {what} of {length:,} bytes, and {most:,} are the most")
        return _decoded(self.take(length), what)

    def strings_of(self, count: int, what: str) -> tuple[str, ...]:
        """The next strings. Inlines its loop, because vocabularies have hundreds of thousands."""
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise HeaderError(f"has more than {MAX_STRINGS:,} strings")
        data, position, found = self._data, self.position, []
        known, from_bytes = len(data), int.from_bytes
        for _ in range(count):
            end = position + 8
            if end > known:
                self._grow(end)
                data, known = self._data, len(self._data)
            start, end = end, end + from_bytes(data[position:end], "little")
            if end > known:
                self._grow(end)
                data, known = self._data, len(self._data)
            found.append(data[start:end])
            position = end
        self.position = position
        try:
            return tuple(map(bytes.decode, found))
        except UnicodeDecodeError as error:
            raise HeaderError(f"has text in {what} that is not UTF-8") from error

    def _grow(self, end: int) -> None:
        if end > self._most:
            if self._most < self.size:
                raise HeaderError(f"has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
            raise HeaderError("ends within its header")
        wanted = max(end, 2 * len(self._data), _FIRST_PART_BYTES)
        count = min(wanted, self._most) - len(self._data)
        self._data += self._read_at(len(self._data), count)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string(_MAX_KEY_BYTES, "a key")
        if not key or key in metadata:
            raise HeaderError(
                f"has the key {shown(key)} twice" if key else "has a key without name"
            )
        metadata[key] = _read_value(cursor, cursor.number("<I"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Value:
    if kind == _STRING:
        return cursor.string(MAX_HEADER_BYTES, f"a value of {shown(key)}")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    values = _read_numbers(cursor, kind, 1, key)
    value: bool | int | float = values[0].item()
    return value


def _read_array(cursor: _Cursor, key: str) -> Value:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == _ARRAY:
        remedy = "fetch the model from another publisher"
        raise HeaderError(f"has nested arrays as {shown(key)}, which Edge cannot read", remedy)
    least_bytes = 8 if kind == _STRING else _number_bytes(kind, key)
    cursor.check_count(count, least_bytes, MAX_ARRAY, f"values of {shown(key)}")
    if kind == _STRING:
        return cursor.strings_of(count, shown(key))
    return _read_numbers(cursor, kind, count, key)


def _read_numbers(cursor: _Cursor, kind: int, count: int, key: str) -> NDArray[Any]:
    content = cursor.take(count * _number_bytes(kind, key))
    if kind == _BOOL:
        values = np.frombuffer(content, np.uint8)
        if count and values.max() > 1:
            raise HeaderError(f"has {shown(key)}, which should be true or false, as another number")
        return values.astype(np.bool_)
    return np.frombuffer(content, _NUMBERS[kind])


def _number_bytes(kind: int, key: str) -> int:
    if kind == _BOOL:
        return 1
    if kind not in _NUMBERS:
        raise HeaderError(f"has {shown(key)} of type {kind}, which no version of GGUF knows")
    return np.dtype(_NUMBERS[kind]).itemsize


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise HeaderError(f"has general.alignment {shown(value)}, which must be a power of two")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    described: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.string(_MAX_NAME_BYTES, "a tensor's name")
        if not name or name in described:
            raise HeaderError(f"has the tensor {shown(name)} twice or without a name")
        axes = cursor.number("<I")
        if not 1 <= axes <= _MAX_AXES:
            raise HeaderError(
                f"has tensor {shown(name)} with {axes} dimensions, not 1 to {_MAX_AXES}"
            )
        sizes = struct.unpack(f"<{axes}Q", cursor.take(8 * axes))
        number, offset = struct.unpack("<IQ", cursor.take(12))
        if number not in BLOCK_TYPES:
            raise HeaderError(
                f"has tensor {shown(name)} of type {number}, which is not known here",
                f"fetch the model in one of {', '.join(READ_TYPES)}",
            )
        kind = BLOCK_TYPES[number]
        if not all(1 <= each <= _MAX_SIZE for each in sizes) or sizes[0] % kind.block_size:
            raise HeaderError(
                f"has tensor {shown(name)} of shape {list(reversed(sizes))}, which is not made of "
                f"blocks of {kind.name} ({kind.block_size} weights)"
            )
        if offset % alignment:
            raise HeaderError(f"has tensor {shown(name)} at an offset that is not aligned")
        described[name] = kind, tuple(reversed(sizes)), offset
    begin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(
            type=kind,
            shape=shape,
            begin=begin + offset,
            end=begin + offset + math.prod(shape) // kind.block_size * kind.block_bytes,
        )
        for name, (kind, shape, offset) in described.items()
    }
    _check_places(tensors, cursor.size)
    return tensors


def _check_places(tensors: Mapping[str, GgufTensor], size: int) -> None:
    """Raises HeaderError unless all tensors are within the file and do not overlap."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if tensor.begin < end:
            raise HeaderError(f"has tensor {shown(name)} within the bytes of another")
        end = tensor.end
        if end > size:
            raise HeaderError(
                f"is incomplete: it has {size:,} bytes, and tensor {shown(name)} ends at {end:,}"
            )


def _decoded(content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HeaderError(f"has {what} that is not UTF-8") from error
