"""One safetensors file, written in any order by any thread, visible only once it is whole."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge.offload.files.durable import disk_errors_as_store_errors, write_all
from edge.offload.files.safetensors_file import DTYPES
from edge.system.files import allocate, sync_folder


class SafetensorsWriter:
    """Writes a file of tensors of known shapes and types; a context manager.

    Leaving the context makes the file durable and gives it its name; after an error it is removed.
    A killed process leaves `<name>.partial`, which is never read. Raises StoreFullError on entering
    if the disk lacks room.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """tensors: {name: (type in the format's name, shape of one axis or more)}.

        metadata: of the header; some libraries require {"format": "pt"}.
        """
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._row_bytes: dict[str, int] = {}
        offsets: dict[str, int] = {}
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        end = 0
        for name, (dtype, shape) in tensors.items():
            self._row_bytes[name] = math.prod(shape[1:]) * DTYPES[dtype].itemsize
            nbytes = shape[0] * self._row_bytes[name]
            offsets[name] = end
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [end, end + nbytes],
            }
            end += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        # The format pads with spaces. Data aligned to a cache line is copied fastest.
        text += b" " * (-(8 + len(text)) % 64)
        self._head = len(text).to_bytes(8, "little") + text
        self._begin = {name: len(self._head) + offset for name, offset in offsets.items()}
        self.total_bytes = len(self._head) + end
        """Size of the whole file."""

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb", buffering=0)
        try:
            with disk_errors_as_store_errors(self._partial):
                allocate(self._file.fileno(), 0, self.total_bytes)
                write_all(self._file.fileno(), memoryview(self._head), 0)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            with disk_errors_as_store_errors(self._partial):
                os.fsync(self._file.fileno())
            self._partial.replace(self._path)
        except BaseException:
            self._abandon()
            raise
        self._file.close()
        sync_folder(self._path.parent)

    def write_rows(self, name: str, first_row: int, rows: NDArray[Any]) -> None:
        """Write `rows` from row `first_row` of the tensor on. Raises StoreFullError."""
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        offset = self._begin[name] + first_row * self._row_bytes[name]
        with disk_errors_as_store_errors(self._partial):
            write_all(self._file.fileno(), content, offset)

    def _abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)
