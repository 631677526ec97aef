"""Tensors of any shape and type as bytes, and back. Bytes from outside are checked.

A blob: the length of a table, the table as JSON, and the content of one tensor after the other,
row-major and little-endian. Strings are UTF-8, each behind its length.

Needs numpy and the standard library alone, because the process that computes parts starts with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = frozenset(
    (
        "float16", "float32", "float64", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64", "bool", "string",
    )
)  # fmt: skip
MOST_TENSORS = 4096
MOST_AXES = 16
MOST_TABLE_BYTES = 16 << 20
MOST_BYTES = 1 << 40
_MOST_VALUES = 64 * MOST_TENSORS
_HEAD = 4

Arrays = Mapping[str, NDArray[Any]]


def dtype_name(array: NDArray[Any]) -> str:
    """The name of an array's type. Raises ValueError for one that does not travel."""
    name = "string" if array.dtype.kind in "OUS" else array.dtype.name
    if name not in DTYPES:
        raise ValueError(f"{name} is not one of {', '.join(sorted(DTYPES))}")
    return name


def pack(arrays: Arrays, **others: Any) -> bytes:
    """The arrays as a blob. others: JSON values that go with them."""
    return b"".join(pack_parts(arrays, **others))


def pack_parts(arrays: Arrays, **others: Any) -> list[bytes | memoryview]:
    """The same in parts, without a copy. Each array of numbers is a part of its own."""
    table, contents = [], []
    for name, array in arrays.items():
        dtype = dtype_name(array)
        content = _strings(array) if dtype == "string" else _plain(array)
        table.append([name, dtype, list(array.shape), len(content)])
        contents.append(content)
    head = json.dumps({"tensors": table, **others}, separators=(",", ":")).encode()
    return [len(head).to_bytes(_HEAD, "little") + head, *contents]


def unpack(blob: bytes | bytearray | memoryview) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays of a blob, and the other values. Arrays share the memory of the blob.

    Raises ValueError for a blob that `pack` cannot make.
    """
    view = memoryview(blob)
    length = int.from_bytes(view[:_HEAD], "little")
    if len(view) < _HEAD or length > MOST_TABLE_BYTES or _HEAD + length > len(view):
        raise ValueError("the table of tensors is cut off")
    head = bytes(view[_HEAD : _HEAD + length])
    if head.count(b",") + head.count(b"[") > _MOST_VALUES:  # each may take 60 bytes of memory
        raise ValueError("the table of tensors has too many values")
    try:
        others = json.loads(head)
    except RecursionError as error:
        raise ValueError("the table of tensors is too deep") from error
    if not isinstance(others, dict) or not isinstance(others.get("tensors"), list):
        raise ValueError("there is no table of tensors")
    table, place = others.pop("tensors"), _HEAD + length
    if len(table) > MOST_TENSORS:
        raise ValueError(f"there are more than {MOST_TENSORS} tensors")
    arrays: dict[str, NDArray[Any]] = {}
    for entry in table:
        name, dtype, shape, nbytes = _checked(entry)
        content = view[place : place + nbytes]
        if name in arrays or len(content) != nbytes:
            raise ValueError("a tensor comes twice, or is cut off")
        place += nbytes
        if dtype == "string":
            arrays[name] = _read_strings(content, shape)
        elif nbytes != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"{nbytes} bytes are no {dtype} {list(shape)}")
        else:
            arrays[name] = np.frombuffer(content, dtype).reshape(shape)
    if place != len(view):
        raise ValueError(f"there are {len(view) - place} bytes behind the last tensor")
    return arrays, others


def _checked(entry: Any) -> tuple[str, str, tuple[int, ...], int]:
    if not isinstance(entry, list) or len(entry) != 4:
        raise ValueError("an entry of the table is no tensor")
    name, dtype, shape, nbytes = entry
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError("a tensor has no name, or no type that travels")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(map(_is_size, shape)):
        raise ValueError(f"a tensor has no shape of at most {MOST_AXES} axes")
    if not _is_size(nbytes):
        raise ValueError("a tensor has no size")
    return name, dtype, tuple(shape), nbytes


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_BYTES


def _plain(array: NDArray[Any]) -> memoryview:
    fixed = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return fixed.reshape(-1).view(np.uint8).data


def _strings(array: NDArray[Any]) -> bytes:
    encoded = [_encoded(each) for each in array.reshape(-1).tolist()]
    lengths = np.array([len(each) for each in encoded], "<u4")
    return lengths.tobytes() + b"".join(encoded)


def _encoded(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"a tensor of strings has {type(value).__name__}")
    return value.encode("utf-8", "surrogateescape")


def _read_strings(content: memoryview, shape: tuple[int, ...]) -> NDArray[Any]:
    count = math.prod(shape)
    if 4 * count > len(content):
        raise ValueError("the lengths of strings are cut off")
    lengths = np.frombuffer(content[: 4 * count], "<u4").astype(np.int64)
    ends = 4 * count + np.cumsum(lengths)
    if (int(ends[-1]) if count else 0) != len(content):
        raise ValueError("strings are cut off, or there is more behind them")
    array = np.empty(count, object)
    for index, (end, size) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        array[index] = str(content[end - size : end], "utf-8", "surrogateescape")
    return array.reshape(shape)
