"""Memory in pages: private mappings, advice about them, and mapped parts of files.

Advice is a hint: without it more memory stays in use, or reading is slower, and numbers are equal.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from edge.system.kind import PORTABLE

HUGE_PAGE_BYTES = 2 << 20

Advice = Literal["drop", "huge", "not huge"]
"""`drop`: the pages' content is not needed, and their memory is free again."""

_LINUX_ADVICE: dict[Advice, int] = {"drop": 4, "huge": 14, "not huge": 15}
"""Linux's values; the mmap module has some only in some builds of Python."""

_MAP_NORESERVE = 0x4000
"""Linux's value: address space that need not be free as memory yet."""

_MAP_FIXED = 0x10

FileMapping = tuple[int, int, int]
"""(start, end, offset in the file)."""


def private_memory(num_bytes: int, *, is_reserved: bool = True) -> mmap.mmap:
    """New memory that the system commits page by page when it is written.

    is_reserved: False for address space of which most may never be written. Raises OSError.
    """
    if sys.platform == "win32" or PORTABLE:
        return mmap.mmap(-1, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux" and not is_reserved:
        flags |= _MAP_NORESERVE
    return mmap.mmap(-1, num_bytes, flags=flags)


def advise(memory: mmap.mmap, advice: Advice, begin: int = 0, num_bytes: int | None = None) -> None:
    """Advice about private memory, in whole pages. Dropped pages are zero afterwards or unchanged,
    so their content must not be used."""
    if sys.platform == "linux" and not PORTABLE:
        length = len(memory) - begin if num_bytes is None else num_bytes
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(_LINUX_ADVICE[advice], begin, length)


def address_of(memory: memoryview) -> int:
    """The address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def advise_at(address: int, num_bytes: int, advice: Advice) -> None:
    """Advice about memory at an address."""
    if sys.platform == "linux" and not PORTABLE:
        libc = ctypes.CDLL(None)
        where, length = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        libc.madvise(where, length, _LINUX_ADVICE[advice])


def mappings_of(path: Path) -> Iterator[FileMapping]:
    """Every mapping of the file in this process; none where the system does not tell."""
    yield from ()
    if sys.platform == "linux" and not PORTABLE:
        name = str(path.resolve())  # as the system names it
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if not line.endswith(name):
                continue
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == name:
                start, end = (int(each, 16) for each in fields[0].split("-"))
                yield start, end, int(fields[2], 16)


def let_go_of(mappings: Sequence[FileMapping]) -> None:
    """Drop the pages of mapped files; they are read from the file again when they are used."""
    for start, end, _offset in mappings:
        advise_at(start, end - start, "drop")


def memory_over(address: int, num_bytes: int) -> memoryview | None:
    """Private memory, in whole pages, put over an existing mapping; None: the system refuses.

    Pages are allocated when they are written.
    """
    if sys.platform != "linux" or PORTABLE:
        return None
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if mapped(address, size) != address:
        return None
    advise_at(address, size, "huge")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def can_put_memory_over_mappings() -> bool:
    """Whether `mappings_of` and `memory_over` work: layers on disk need both."""
    return sys.platform == "linux" and not PORTABLE


def mapped(address: int | None, num_bytes: int) -> int | None:
    """The address of new private memory, by the system's mmap; None: it refuses. `address`: to put
    it over what is mapped there."""
    if sys.platform == "win32":
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if address is None else _MAP_FIXED)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start = libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return None if start == ctypes.c_void_p(-1).value else start
