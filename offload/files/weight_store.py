"""Tensors by name, read in slices, from safetensors files or from memory.

Knows files and their headers, but no models or plans.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.offload.errors import StoreCorruptError, StoreMissingError
from edge.offload.files.bounded_json import read_file
from edge.offload.files.closing import Closing
from edge.offload.files.safetensors_file import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    TensorPlace,
    is_unicode,
    loads,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Most files of a checkpoint, which all stay open. The largest published ones have 300.
MAX_FILES = 500
MAX_TENSORS = 250_000
_MAX_NAME_LENGTH = 255


class WeightStore(Protocol):
    """Named tensors that are read in slices; safe to read from several threads at once."""

    @property
    def fingerprint(self) -> str:
        """Hex digits that change with the content. Computed without reading the content."""

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises StoreMissingError for an unknown name."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """The stored type, which may be ml_dtypes' bfloat16 or float8.

        Raises StoreMissingError, and StoreUnsupportedError for a type that numpy lacks.
        """

    def where(self, name: str) -> str:
        """The place of a tensor, for people: its file. Raises StoreMissingError."""

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        """A new, writable, C-contiguous copy in the stored type.

        rows: a run along axis 0; columns: along axis 1; None: all. Reads little more than the bytes
        of the slice. Raises StoreMissingError and StoreUnsupportedError like `dtype`,
        StoreCorruptError if the file has shrunk, ValueError for a run outside the tensor or a
        closed store.
        """

    def close(self) -> None:
        """Close the files. May be called again; later reads raise ValueError."""


class MemoryStore:
    """A WeightStore over arrays, which are not copied and must not change."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self._closed = False
        digest = hashlib.sha256()
        for name, array in self._tensors.items():
            digest.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.fingerprint = digest.hexdigest()[:32]
        """Hash of all content, which is in memory."""

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._tensor(name).dtype

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        if self._closed:
            raise ValueError("the weight store is closed")
        tensor = self._tensor(name)
        slices = [slice(run.start, run.stop) for run in checked_runs(tensor.shape, rows, columns)]
        return np.array(tensor[tuple(slices)], order="C")

    def where(self, name: str) -> str:
        self._tensor(name)
        return "memory"

    def close(self) -> None:
        self._closed = True

    def _tensor(self, name: str) -> NDArray[Any]:
        if name not in self._tensors:
            raise StoreMissingError(f"there is no tensor {name!r} in this store")
        return self._tensors[name]


class SafetensorsStore(Closing):
    """A WeightStore over a Hugging Face checkpoint: one safetensors file, or an index and shards.

    `path` is the folder, or one safetensors file. Opening reads the headers only and checks them
    against the sizes of the files. Raises StoreMissingError, StoreCorruptError and
    StoreUnsupportedError.
    """

    def __init__(self, path: Path) -> None:
        self._files: list[SafetensorsFile] = []
        self._places: dict[str, SafetensorsFile] = {}
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(f"{file.path.name}\0{file.size}\0{file.mtime_ns}\0".encode())
            digest.update(file.header_digest)
        self.fingerprint = digest.hexdigest()[:32]
        """Hash of the files' names, sizes, times of change and headers."""

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._places))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._file(name).dtype(name)

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        file = self._file(name)
        return file.read(name, checked_runs(file.tensors[name].shape, rows, columns))

    def where(self, name: str) -> str:
        return str(self._file(name).path)

    def place(self, name: str) -> TensorPlace:
        """The header's entry of a tensor, also of an unsupported type. Raises StoreMissingError."""
        return self._file(name).tensors[name]

    @property
    def num_files(self) -> int:
        return len(self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._places:
            where = self._files[0].path.parent
            raise StoreMissingError(
                f"the checkpoint in {where} has no tensor {name!r}: it is of another architecture "
                "than its config.json says, or incomplete; download it again"
            )
        return self._places[name]

    def _open(self, path: Path) -> None:
        if path.is_file():
            self._add(path)
        elif (path / SINGLE_FILE).is_file():
            self._add(own_file(path / SINGLE_FILE))
        elif (path / INDEX_FILE).is_file():
            self._open_index(path / INDEX_FILE)
        else:
            raise StoreMissingError(
                f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the folder of a "
                "downloaded Hugging Face checkpoint"
            )
        if not self._places:
            raise StoreCorruptError(f"{path} holds no tensors; download the checkpoint again")

    def _add(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self._files.append(file)
        tensors = sum(len(each.tensors) for each in self._files)
        header_bytes = sum(each.header_bytes for each in self._files)
        if tensors > MAX_TENSORS or header_bytes > MAX_HEADER_BYTES:
            raise StoreCorruptError(
                f"{path.parent} holds more than {MAX_TENSORS:,} tensors, or more than "
                f"{MAX_HEADER_BYTES:,} bytes that describe them: no model is read from it"
            )
        if len(self._files) == 1:
            self._places = dict.fromkeys(file.tensors, file)
        return file

    def _open_index(self, index: Path) -> None:
        weight_map = _read_weight_map(index)
        files: dict[str, SafetensorsFile] = {}
        for name in sorted(set(weight_map.values())):
            if not (index.parent / name).is_file():
                raise StoreMissingError(
                    f"{index.name} names {name}, which is not in {index.parent}; download the "
                    "rest of the checkpoint"
                )
            files[name] = self._add(own_file(index.parent / name))
        # Headers and not the index locate tensors, because an index may be outdated.
        self._places = {tensor: file for file in self._files for tensor in file.tensors}
        for tensor, name in weight_map.items():
            if tensor in files[name].tensors:
                self._places[tensor] = files[name]


def checked_runs(
    shape: tuple[int, ...], rows: range | None, columns: range | None
) -> tuple[range, ...]:
    """The requested runs of the leading axes. Raises ValueError for a run outside the tensor."""
    asked = [rows, columns]
    while asked and asked[-1] is None:
        asked.pop()
    if len(asked) > len(shape):
        raise ValueError(f"a tensor of shape {list(shape)} has no axis {len(asked) - 1} to slice")
    complete = []
    for size, run in zip(shape, asked, strict=False):
        run = range(size) if run is None else run  # noqa: PLW2901
        if run.step != 1 or not 0 <= run.start <= run.stop <= size:
            raise ValueError(f"{run} is not a run within an axis of size {size}")
        complete.append(run)
    return tuple(complete)


def own_file(path: Path) -> Path:
    """`path`. Raises StoreCorruptError for a link to elsewhere, except to blobs of a Hugging Face
    cache."""
    if path.is_symlink():
        target = path.resolve()
        blobs = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
        if not blobs and not target.is_relative_to(path.parent.resolve()):
            raise StoreCorruptError(
                f"{path} is a link to {target}, outside of the checkpoint; put the file itself "
                "into the folder"
            )
    return path


def indexed_files(index: Path) -> list[str]:
    """The files that a checkpoint's index names. Raises StoreCorruptError for a damaged index."""
    return sorted(set(_read_weight_map(index).values()))


def _read_weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor to file name. Each is checked to be a file in its folder."""
    try:
        text = read_file(index, MAX_HEADER_BYTES)
    except (OSError, ValueError) as error:
        raise StoreCorruptError(
            f"{index} cannot be read ({error}); download it again, or check its permissions"
        ) from error
    content = loads(text, index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise StoreCorruptError(f"{index} has no weight_map; download it again")
    names: set[str] = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in {"", ".", ".."} or name != Path(name).name:
            raise StoreCorruptError(
                f"{index} places {shown(tensor)} in {shown(name)}, which is not the plain name of "
                "a file in its folder; do not use this checkpoint"
            )
        if "\0" in name or "\\" in name or not is_unicode(name) or len(name) > _MAX_NAME_LENGTH:
            raise StoreCorruptError(f"{index} holds the impossible file name {shown(name)}")
        names.add(name)
    if len(names) > MAX_FILES:
        raise StoreCorruptError(
            f"{index} names {len(names):,} files, and {MAX_FILES} are the most that are opened"
        )
    return weight_map
