"""Reads parts of an open file by position, exactly the requested bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.system.files import read_into

# Gaps smaller than this are read through, because a separate read takes a disk about 100 µs, in
# which it could read as many bytes.
_READ_THROUGH_BYTES = 64 * 1024
_SCRATCH_BYTES = 4 * 1024 * 1024
# Linux moves at most 0x7ffff000 bytes per call.
_MAX_CALL_BYTES = 1 << 30


class EndedError(Exception):
    """The file ended at `offset`, before the requested bytes."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"it ended at byte {offset:,} while it was being read")
        self.offset = offset


def fill(descriptor: int, target: NDArray[np.uint8], offset: int) -> None:
    """Read exactly len(target) bytes from `offset` on. Raises EndedError."""
    view = target.data
    while view:
        count = read_into(descriptor, view[:_MAX_CALL_BYTES], offset)
        if count == 0:
            raise EndedError(offset)
        view = view[count:]
        offset += count


def fill_columns(
    descriptor: int, result: NDArray[np.uint8], begin: int, *, row_bytes: int, skip: int
) -> None:
    """Fill result [rows, bytes] from rows of `row_bytes`, the first at `begin`, without the first
    `skip` bytes of each. Raises EndedError."""
    num_rows, part_bytes = result.shape
    if part_bytes == row_bytes:
        fill(descriptor, result.reshape(-1), begin)
        return
    if row_bytes - part_bytes >= _READ_THROUGH_BYTES:
        for row in range(num_rows):
            fill(descriptor, result[row], begin + row * row_bytes + skip)
        return
    step = max(1, _SCRATCH_BYTES // row_bytes)
    scratch = np.empty((min(step, num_rows), row_bytes), np.uint8)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        fill(descriptor, scratch[:count].reshape(-1), begin + row * row_bytes)
        result[row : row + count] = scratch[:count, skip : skip + part_bytes]


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
