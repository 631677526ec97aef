"""One GGUF file, read by position. `gguf_header.py` checks it when it is opened.

Uses `pread` and not `mmap`, for the reasons in `safetensors_file.py`. Knows no models and no names.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.errors import StoreCorruptError, StoreMissingError, StoreUnsupportedError
from edge.offload.files.closing import Closing
from edge.offload.files.gguf_header import MAGIC, GgufTensor, HeaderError, Value, read_header
from edge.offload.files.gguf_types import READ_TYPES, BlockType
from edge.offload.files.positioned import EndedError, as_bytes, fill, fill_columns
from edge.system.files import open_for_reading, read_at

_FLOAT32 = np.dtype(np.float32)
_CHUNK_WEIGHTS = 1 << 20
"""Weights that are dequantized at once, so that temporary arrays stay in a core's cache."""


class GgufFile(Closing):
    """An open file whose header was checked against its size; reads from several threads at once.

    metadata: by key. tensors: by name. Raises StoreMissingError, and StoreCorruptError for any
    other file; the message names the file and the remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_for_reading(path)
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise StoreMissingError(
                f"cannot open {path}: {cause}; check that it is there and readable"
            ) from error
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _refused(path, "is not a regular file")
            self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
            header = read_header(self._read_at, self.size)
            self.header_bytes = header.nbytes
            self.header_digest = hashlib.sha256(self._read_at(0, header.nbytes)).digest()
        except HeaderError as error:
            self.close()
            raise _refused(path, str(error)) from error
        except BaseException:
            self.close()
            raise
        self.metadata: Mapping[str, Value] = header.metadata
        self.tensors: Mapping[str, GgufTensor] = header.tensors

    def type(self, name: str) -> BlockType:
        """The type of a tensor. Raises StoreUnsupportedError for an unsupported type or shape."""
        tensor = self.tensors[name]
        if not tensor.type.is_read:
            raise StoreUnsupportedError(
                f"tensor {name} in {self.path} is of type {tensor.type.name}, which is not read "
                f"here; fetch the model in one of {', '.join(READ_TYPES)}"
            )
        if len(tensor.shape) > 3:
            raise StoreUnsupportedError(
                f"tensor {name} in {self.path} has the shape {list(tensor.shape)}; vectors, "
                "matrices and stacks of matrices are read here"
            )
        return tensor.type

    def blocks(self, name: str, rows: range, blocks: range) -> NDArray[np.uint8]:
        """Raw blocks uint8 [rows, blocks, block_bytes]. A vector is a matrix of one row, and the
        rows of stacked matrices follow each other.

        blocks: counted within a row. Raises StoreUnsupportedError as `type`, StoreCorruptError if
        the file has shrunk, ValueError after `close`.
        """
        kind, tensor = self.type(name), self.tensors[name]
        row_bytes = tensor.shape[-1] // kind.block_size * kind.block_bytes
        result = np.empty((len(rows), len(blocks), kind.block_bytes), np.uint8)
        if self._descriptor < 0:
            raise ValueError(f"{self.path} is closed")
        if result.size == 0:
            return result
        try:
            fill_columns(
                self._descriptor,
                as_bytes(result).reshape(len(rows), -1),
                tensor.begin + rows.start * row_bytes,
                row_bytes=row_bytes,
                skip=blocks.start * kind.block_bytes,
            )
        except EndedError as error:
            raise _refused(self.path, f"is damaged: {error}; download it again") from error
        return result

    def read(
        self, name: str, rows: range, columns: range, dtype: np.dtype[Any] = _FLOAT32
    ) -> NDArray[Any]:
        """Weights [rows, columns] as `dtype`. Raises like `blocks`."""
        kind = self.type(name)
        size = kind.block_size
        first, last = columns.start // size, -(-columns.stop // size)
        skip = columns.start - first * size
        result = np.empty((len(rows), len(columns)), dtype)
        if result.size == 0:
            return result
        if kind.dtype == dtype:
            result[...] = self.blocks(name, rows, range(first, last)).view(dtype)[..., 0]
            return result
        step = max(1, _CHUNK_WEIGHTS // ((last - first) * size))
        for row in range(rows.start, rows.stop, step):
            part = range(row, min(row + step, rows.stop))
            values = kind.dequantize(self.blocks(name, part, range(first, last)))
            with np.errstate(over="ignore"):  # overflow gives infinity, which is refused later
                result[part.start - rows.start : part.stop - rows.start] = values[
                    :, skip : skip + len(columns)
                ]
        return result

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_at(self, offset: int, count: int) -> bytes:
        result = np.empty(count, np.uint8)
        try:
            fill(self._descriptor, result, offset)
        except EndedError as error:
            raise HeaderError(f"is damaged: {error}") from error
        return result.tobytes()


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file; False if it cannot be read."""
    try:
        descriptor = open_for_reading(path)
    except OSError:
        return False
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return is_file and read_at(descriptor, len(MAGIC), 0) == MAGIC
    finally:
        os.close(descriptor)


def _refused(path: Path, cause: str) -> StoreCorruptError:
    return StoreCorruptError(f"{path} {cause}")
