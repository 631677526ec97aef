"""Measurement of this device's disk read rate."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from pathlib import Path

from edge.system.files import forget_pages, open_direct, open_for_reading, read_into
from edge.system.pages import HUGE_PAGE_BYTES, address_of, advise, private_memory

TEMPORARY = "measuring-"
"""The prefix of temporary folders, which are removed after the measurement."""

_PIECE_BYTES = 4 << 20
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 128 << 20
_SPAN_S = 0.25


def disk_read_bytes_per_s(folder: Path, shards: Path) -> float | None:
    """The rate of reading a large file under `shards`, or else one written to `folder`.

    Bypasses the page cache if the file system allows it. None: there is nothing to read.
    """
    with contextlib.suppress(OSError):
        for path in sorted(shards.glob("*/weights")):
            if path.stat().st_size >= _LEAST_BYTES:
                return _read_rate(path)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as own:
            path = Path(own) / "weights"
            with path.open("wb") as file:
                piece = os.urandom(_PIECE_BYTES)
                for _ in range(_LEAST_BYTES // _PIECE_BYTES):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            return _read_rate(path)
    return None


def _read_rate(path: Path) -> float:
    """Bytes a second. Raises OSError."""
    descriptor = open_direct(path)
    if descriptor is None:
        descriptor = open_for_reading(path)
    try:
        forget_pages(descriptor)
        # At a random place: earlier reads may be in the disk's own cache.
        spare_bytes = max(0, os.fstat(descriptor).st_size - _MOST_BYTES)
        first = secrets.randbelow(spare_bytes // _PIECE_BYTES + 1) * _PIECE_BYTES
        with private_memory(_PIECE_BYTES + HUGE_PAGE_BYTES) as memory:
            # Large reads, like those of weights: with 4 KiB a fast disk has a third of its rate.
            advise(memory, "huge")
            with memoryview(memory) as whole, _aligned(whole) as buffer:
                buffer[:] = bytes(len(buffer))  # touch its pages before the clock runs
                done, start_s = 0, time.perf_counter()
                while done < _MOST_BYTES and time.perf_counter() - start_s < _SPAN_S:
                    count = read_into(descriptor, buffer, first + done)
                    done += count
                    if count < _PIECE_BYTES:
                        break
                if not done:
                    raise OSError(f"{path} is empty")
                return done / (time.perf_counter() - start_s)
    finally:
        os.close(descriptor)


def _aligned(memory: memoryview) -> memoryview:
    start = -address_of(memory) % HUGE_PAGE_BYTES
    return memory[start : start + _PIECE_BYTES]
