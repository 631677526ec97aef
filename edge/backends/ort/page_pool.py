"""Adjacent pages into which weights are read, and which pass from one layer to the next.

A disk writes into physical pages: at its full rate into a huge page or a piece of one, and at a
third of it into scattered pages of 4 KiB. Most of a part is huge pages by itself. Its end is too
short for one, so the ends of all parts are cut from common huge pages here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from edge.errors import RequestError
from edge.host.huge_pages import HUGE_PAGE_BYTES

_MAP_FIXED, _MADV_HUGEPAGE = 0x10, 14
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


class PageSupply:
    """Pages for one program's parts, which `own_memory` made. Not thread-safe."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._next = self._end = 0
        """Addresses of the rest of the huge page that is being cut."""
        self._supplied: dict[int, tuple[int, ...]] = {}
        """Ends of parts that have pages, by address: the bytes cut from each huge page. mremap
        moves only pages of one cut at a time."""

    def supply(self, parts: Sequence[memoryview]) -> None:
        """Give the ends of parts pages before the parts are written, unless they have some.

        If the system refuses, the pages are allocated one by one when they are written.
        """
        for part in parts:
            address, nbytes = _ranges(part)[-1]
            if nbytes < HUGE_PAGE_BYTES and address not in self._supplied:
                self._supplied[address] = self._cut(address, nbytes)

    def hand_on(self, parts: Sequence[memoryview], to: Sequence[memoryview] | None) -> None:
        """Move the pages of parts to others of the same sizes, or return them to the system.

        Moved pages need not be cleared by the system again. The parts can be written again after
        `supply`.
        """
        if to is not None and [each.nbytes for each in to] != [each.nbytes for each in parts]:
            to = None
        for number, part in enumerate(parts):
            targets = None if to is None else _ranges(to[number])
            for place, (address, nbytes) in enumerate(_ranges(part)):
                cut = self._supplied.pop(address, None)
                sizes = cut or (nbytes,)
                if targets is not None and self._move(address, targets[place][0], sizes):
                    if cut is not None:
                        self._supplied[targets[place][0]] = cut
                else:
                    _advise(self._libc, address, nbytes, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Free the rest of the current huge page. May be called again."""
        if self._end > self._next:
            self._libc.munmap(ctypes.c_void_p(self._next), ctypes.c_size_t(self._end - self._next))
        self._next = self._end = 0

    def _cut(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Cut `nbytes` from huge pages for this address. Returns the bytes from each page."""
        sizes: list[int] = []
        while (left := nbytes - sum(sizes)) > 0:
            if self._next == self._end and not self._new_page():
                break
            size = min(left, self._end - self._next)
            flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
            if not self._remap(self._next, address + sum(sizes), size, flags):
                break
            self._next += size
            sizes.append(size)
        return tuple(sizes) if sum(sizes) == nbytes else (*sizes, nbytes - sum(sizes))

    def _new_page(self) -> bool:
        size = 2 * HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start is None or start == ctypes.c_void_p(-1).value:
            return False
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = first + HUGE_PAGE_BYTES
        for low, high in ((start, first), (last, start + size)):
            if high > low:
                self._libc.munmap(ctypes.c_void_p(low), ctypes.c_size_t(high - low))
        _advise(self._libc, first, HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
        ctypes.memset(first, 0, HUGE_PAGE_BYTES)  # allocates it as one huge page
        self._next, self._end = first, last
        return True

    def _move(self, address: int, target: int, sizes: Sequence[int]) -> bool:
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        done = 0
        for size in sizes:
            if not self._remap(address + done, target + done, size, flags):
                return False
            done += size
        return True

    def _remap(self, address: int, target: int, nbytes: int, flags: int) -> bool:
        size = ctypes.c_size_t(nbytes)
        place = ctypes.c_void_p(target)
        moved = self._libc.mremap(ctypes.c_void_p(address), size, size, flags, place)
        return bool(moved == target)


def own_memory(address: int, nbytes: int) -> memoryview:
    """Map private memory, in whole pages, over an existing mapping at an address.

    Pages are allocated when they are written. Raises RequestError if the system refuses.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, size, protection, flags, -1, 0) != address:
        raise RequestError("the system refuses to map memory for streamed weights")
    _advise(libc, address, size, _MADV_HUGEPAGE)
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def want_huge_pages(parts: Sequence[memoryview]) -> None:
    """Ask for huge pages in parts that `own_memory` made."""
    libc = _libc()
    for part in parts:
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        _advise(libc, address, part.nbytes, _MADV_HUGEPAGE)


def _ranges(part: memoryview) -> list[tuple[int, int]]:
    """(address, bytes) of the whole huge pages of a part, if any, and of the rest."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(part))
    if address % HUGE_PAGE_BYTES:
        return [(address, part.nbytes)]
    whole = part.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    found = [(address, whole), (address + whole, part.nbytes - whole)]
    return [(start, nbytes) for start, nbytes in found if nbytes]


def _advise(libc: ctypes.CDLL, address: int, nbytes: int, advice: int) -> None:
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc
