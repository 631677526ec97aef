"""One safetensors file, read by position.

Uses `pread` and not `mmap`: a file that is truncated while it is open raises an error and not
SIGBUS, and pages that were read do not count as this process's memory.
"""

import hashlib
import io
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edge.offload.errors import StoreCorruptError, StoreMissingError, StoreUnsupportedError
from edge.offload.files.bounded_json import collector_paused, open_at_once, parse_json
from edge.offload.files.closing import Closing
from edge.offload.files.positioned import EndedError, as_bytes, fill, fill_columns
from edge.system.files import read_at

# 140,000 tensors (a checkpoint of a trillion weights: 61 layers of 384 experts) need 20 MiB. The
# format allows 100 MB, which take 15 s and 2.5 GB to read.
MAX_HEADER_BYTES = 32 << 20
_MAX_AXES = 32
_MAX_SIZE = 1 << 48
_MAX_NAME_LENGTH = 1000
_DTYPE = re.compile(r"[A-Z0-9_]{1,16}")

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor's place: dtype in the format's name, begin and end in bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(Closing):
    """An open file whose header was checked against its size.

    Raises StoreMissingError or StoreCorruptError. Tensors of a type that numpy lacks are listed;
    only `dtype` and `read` refuse them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = io.FileIO(path, "rb", opener=open_at_once)
        except OSError as error:
            raise StoreMissingError(
                f"cannot open {path}: {error.strerror}; check that it is there and readable"
            ) from error
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _corrupt(path, "it is not a regular file")
            self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
            header, data_begin = self._read_header()
            self.header_bytes = len(header)
            self.header_digest = hashlib.sha256(header).digest()
            content = loads(header, path)
            if not isinstance(content, dict):
                raise _corrupt(path, "its header is not a table of tensors")
            content.pop("__metadata__", None)
            with collector_paused():
                self.tensors = {
                    name: self._place(name, entry, data_begin) for name, entry in content.items()
                }
            self._check_places(data_begin)
        except BaseException:
            self._file.close()
            raise

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of a tensor. Raises StoreUnsupportedError for a type that numpy lacks."""
        code = self.tensors[name].dtype
        if code not in DTYPES:
            raise StoreUnsupportedError(
                f"tensor {name!r} in {self.path} is of type {code}, which is not supported; use a "
                "checkpoint in BF16, F16 or F32"
            )
        return DTYPES[code]

    def read(self, name: str, runs: Sequence[range]) -> NDArray[Any]:
        """A slice by runs along the leading axes (each within the shape), as a new array."""
        place, dtype = self.tensors[name], self.dtype(name)
        kept = tuple(map(len, runs)) + place.shape[len(runs) :]
        result = np.empty(kept, dtype)
        if result.size == 0:
            return result
        if len(runs) < 2 or len(runs[1]) == place.shape[1]:
            row_bytes = math.prod(place.shape[1:]) * dtype.itemsize
            first = runs[0].start if runs else 0
            self._fill(as_bytes(result), place.begin + first * row_bytes)
            return result
        rows, columns = runs
        row_bytes = (place.end - place.begin) // place.shape[0]
        try:
            fill_columns(
                self._file.fileno(),
                as_bytes(result).reshape(kept[0], -1),
                place.begin + rows.start * row_bytes,
                row_bytes=row_bytes,
                skip=columns.start * (row_bytes // place.shape[1]),
            )
        except EndedError as error:
            raise _corrupt(self.path, str(error)) from error
        return result

    def close(self) -> None:
        self._file.close()

    def _fill(self, target: NDArray[np.uint8], offset: int) -> None:
        """Read exactly len(target) bytes from `offset` on."""
        try:
            fill(self._file.fileno(), target, offset)
        except EndedError as error:
            raise _corrupt(self.path, str(error)) from error

    def _read_header(self) -> tuple[bytes, int]:
        """The header's bytes, and the offset of the data."""
        if self.size < 8:
            raise _corrupt(self.path, f"it has only {self.size} bytes")
        length = int.from_bytes(read_at(self._file.fileno(), 8, 0), "little")
        if 8 + length > self.size:
            raise _corrupt(
                self.path, f"it announces a header of {length:,} bytes but has {self.size:,}"
            )
        if length > MAX_HEADER_BYTES:
            raise _corrupt(
                self.path, f"its header of {length:,} bytes is longer than {MAX_HEADER_BYTES:,}"
            )
        header = np.empty(length, np.uint8)
        self._fill(header, 8)
        return header.tobytes(), 8 + length

    def _place(self, name: str, entry: object, data_begin: int) -> TensorPlace:
        if not 0 < len(name) <= _MAX_NAME_LENGTH or not is_unicode(name):
            raise _corrupt(
                self.path,
                f"its header holds a tensor without a name of 1 to {_MAX_NAME_LENGTH} characters",
            )
        if not isinstance(entry, dict):
            raise _corrupt(self.path, f"its header has no description of {name!r}")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if (
            not isinstance(dtype, str)
            or not _DTYPE.fullmatch(dtype)
            or not _sizes(shape)
            or not _sizes(offsets)
        ):
            raise _corrupt(self.path, f"its header describes {name!r} wrongly")
        if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= self.size - data_begin:
            raise _corrupt(self.path, f"tensor {name!r} lies outside the file")
        nbytes = offsets[1] - offsets[0]
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
            raise _corrupt(
                self.path, f"{nbytes:,} bytes are not a tensor {name!r} of {dtype} {list(shape)}"
            )
        begin = data_begin + offsets[0]
        return TensorPlace(dtype=dtype, shape=tuple(shape), begin=begin, end=begin + nbytes)

    def _check_places(self, data_begin: int) -> None:
        """Check that each byte of the data belongs to one tensor, as the format requires."""
        end = data_begin
        for name, place in sorted(
            self.tensors.items(), key=lambda each: (each[1].begin, each[1].end)
        ):
            if place.begin != end:
                raise _corrupt(
                    self.path, f"tensor {name!r} begins at byte {place.begin:,}, not at {end:,}"
                )
            end = place.end
        if end != self.size:
            raise _corrupt(self.path, f"it has {self.size:,} bytes but its header needs {end:,}")


def loads(text: bytes, path: Path) -> Any:
    """The JSON in `text`. Raises StoreCorruptError, with `path`, if it is invalid."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise _corrupt(path, f"its description is not JSON that is read here ({error})") from error


def is_unicode(text: str) -> bool:
    """Whether a text has no halves of UTF-16 pairs, which only JSON can express."""
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MAX_AXES:
        return False
    return all(type(n) is int and 0 <= n <= _MAX_SIZE for n in value)


def _corrupt(path: Path, what: str) -> StoreCorruptError:
    return StoreCorruptError(f"{path} is damaged: {what}; download the file again")
