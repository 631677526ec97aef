"""The resident pages of a mapped file, which count as this process's memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

Mapping = tuple[int, int, int]
"""(start, end, offset in the file)."""


def mappings_of(path: Path) -> Iterator[Mapping]:
    """Every mapping of the file in this process."""
    name = str(path.resolve())  # as the system names it
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if not line.endswith(name):
            continue
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            start, end = (int(each, 16) for each in fields[0].split("-"))
            yield start, end, int(fields[2], 16)


def let_go_of(mappings: Sequence[Mapping]) -> None:
    """Drop the pages of mappings; they are read from the file again when they are used."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end, _offset in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
