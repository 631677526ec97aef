"""Tensors of a model in GGUF: one file, or the parts into which it was split."""

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.errors import StoreCorruptError, StoreMissingError
from edge.offload.files.closing import Closing
from edge.offload.files.gguf_file import GgufFile
from edge.offload.files.gguf_header import MAX_HEADER_BYTES
from edge.offload.files.gguf_types import BlockType
from edge.offload.files.weight_store import MAX_FILES, checked_runs, own_file

_READING_VERSION = b"1"
"""Part of fingerprints. Raise it when the same file gives other numbers."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def open_gguf(path: Path) -> list[GgufFile]:
    """The file, or all parts of its split file in order; the first part has all metadata. Raises
    StoreMissingError, which names a missing part, and StoreCorruptError.
    """
    files: list[GgufFile] = []
    try:
        given = GgufFile(path)
        files.append(given)
        count = _number(given, "split.count", 1)
        if count <= 1:
            return files
        for number, name in enumerate(_part_names(path, count)):
            part = given if name == path else _opened_part(name, path.name, count)
            if part is not given:
                files.append(part)
            if (_number(part, "split.no", -1), _number(part, "split.count", -1)) != (number, count):
                raise StoreCorruptError(
                    f"{name} does not say that it is part {number + 1} of {count}; download all "
                    "parts of one model into one folder, and rename none"
                )
            if sum(file.header_bytes for file in files) > MAX_HEADER_BYTES:
                raise StoreCorruptError(
                    f"{path} and its other parts have headers of more than "
                    f"{MAX_HEADER_BYTES >> 20} MiB together; no model needs them, fetch another"
                )
        files.sort(key=lambda file: _number(file, "split.no", 0))
        tensors = sum(len(file.tensors) for file in files)
        if tensors != _number(files[0], "split.tensors.count", tensors):
            raise StoreCorruptError(
                f"{files[0].path} announces another number of tensors than its {count} parts have; "
                "download all parts again"
            )
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def first_part(path: Path) -> Path:
    """The first part of the split file to which this part belongs by its name; else the file."""
    found = _PART.fullmatch(path.name)
    return path.with_name(f"{found[1]}-00001-of-{found[3]}{found[4]}") if found else path


def all_parts(path: Path) -> list[Path]:
    """All parts of the split file of which this is the first part, by its name; else the file."""
    found = _PART.fullmatch(path.name)
    return _part_names(path, int(found[3])) if found else [path]


class GgufStore(Closing):
    """A WeightStore over open files, which it closes.

    Tensors of plain numbers keep their type. Tensors of blocks are read as float32, or as float16
    if `as_float16` names them. interleaved: head sizes, by tensor, of rows in llama.cpp's order,
    which alternates rows of the two halves of each head. They are read in the order of a Hugging
    Face checkpoint. Raises ValueError if rows are not whole heads.
    """

    def __init__(
        self,
        files: Sequence[GgufFile],
        *,
        interleaved: Mapping[str, int],
        as_float16: Collection[str] = (),
    ) -> None:
        self._files = tuple(files)
        self._interleaved = dict(interleaved)
        self._as_float16 = frozenset(as_float16)
        self._places: dict[str, GgufFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._places:
                    raise StoreCorruptError(
                        f"{file.path} has tensor {name}, which {self._places[name].path.name} has, "
                        "too; download all parts again"
                    )
                self._places[name] = file
        for name, head_size in interleaved.items():
            if name in self._places and (head_size % 2 or self.shape(name)[0] % head_size):
                raise ValueError(f"{name} of shape {self.shape(name)} is no heads of {head_size}")
        digest = hashlib.sha256(_READING_VERSION)
        for file in files:
            digest.update(f"{file.path.name}\0{file.size}\0{file.mtime_ns}\0".encode())
            digest.update(file.header_digest)
        digest.update(repr((sorted(self._interleaved.items()), sorted(as_float16))).encode())
        self.fingerprint = digest.hexdigest()[:32]
        """Hash of the files' names, sizes, times of change, headers, and of how they are read."""

    @property
    def files(self) -> tuple[GgufFile, ...]:
        """The files in order; the first has all metadata."""
        return self._files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._places))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        own = self.block_type(name).dtype
        if own is not None:
            return own
        return np.dtype(np.float16 if name in self._as_float16 else np.float32)

    def where(self, name: str) -> str:
        return str(self._file(name).path)

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        dtype, shape = self.dtype(name), self.shape(name)
        runs = [*checked_runs(shape, rows, columns)]
        runs += [range(size) for size in shape[len(runs) :]]
        file = self._file(name)
        if len(shape) == 3:
            matrices, height = runs[0], shape[1]
            found = np.empty([*map(len, runs)], dtype)
            for place, number in enumerate(matrices):
                first = number * height
                some = range(first + runs[1].start, first + runs[1].stop)
                found[place] = file.read(name, some, runs[2], dtype)
            return found
        covering = self._covering(name, runs[0])
        if len(shape) == 1:
            values = file.read(name, range(1), covering, dtype)[0]
        else:
            values = file.read(name, covering, runs[1], dtype)
        return self._in_order(name, values, covering, runs[0])

    def block_type(self, name: str) -> BlockType:
        """The type of a tensor. Raises StoreMissingError, StoreUnsupportedError."""
        return self._file(name).type(name)

    def blocks(self, name: str, rows: range, blocks: range) -> NDArray[np.uint8]:
        """Raw blocks of a matrix, uint8 [rows, blocks, bytes of a block], in `read`'s row order.

        Rows of stacked matrices are numbered across all of them. Raises like `read`.
        """
        shape, size = self.shape(name), self.block_type(name).block_size
        height = math.prod(shape[:-1])
        rows, blocks = checked_runs((height, shape[-1] // size), rows, blocks)
        covering = self._covering(name, rows)
        raw = self._file(name).blocks(name, covering, blocks)
        return self._in_order(name, raw, covering, rows)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _covering(self, name: str, rows: range) -> range:
        """The rows of whole heads in the file that contain these rows."""
        size = self._interleaved.get(name, 1)
        return range(rows.start // size * size, -(-rows.stop // size) * size)

    def _in_order(
        self, name: str, values: NDArray[Any], covering: range, rows: range
    ) -> NDArray[Any]:
        """`rows` of the values [covering, …], as a new array unless both are equal."""
        size = self._interleaved.get(name)
        if size is None:
            return values
        pairs = values.reshape(-1, size // 2, 2, *values.shape[1:])
        ordered = pairs.swapaxes(1, 2).reshape(values.shape)
        first = rows.start - covering.start
        return np.ascontiguousarray(ordered[first : first + len(rows)])

    def _file(self, name: str) -> GgufFile:
        if name not in self._places:
            raise StoreMissingError(
                f"{self._files[0].path} has no tensor {name!r}: it is of another architecture than "
                "it says, or incomplete; download it again"
            )
        return self._places[name]


def _opened_part(path: Path, given: str, count: int) -> GgufFile:
    if not path.is_file():
        raise StoreMissingError(
            f"{path} is missing: {given} is one of {count} parts; download the others into the "
            "same folder"
        )
    return GgufFile(own_file(path))


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    return value if type(value) is int else default


def _part_names(path: Path, count: int) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None or int(found[3]) != count or count > MAX_FILES:
        raise StoreCorruptError(
            f"{path} is one of {count} parts, but is not named NAME-00001-of-{count:05}.gguf; give "
            "the parts the names that they were published under"
        )
    return [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{found[4]}")
        for number in range(1, count + 1)
    ]
