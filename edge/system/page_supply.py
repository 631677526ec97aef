"""Adjacent pages into which weights are read, and which pass from one layer to the next.

A disk writes into physical pages: at its full rate into a huge page or a piece of one, and at a
third of it into scattered pages of 4 KiB. Most of a part is huge pages by itself. Its end is too
short for one, so the ends of all parts are cut from common huge pages here.
"""

import ctypes
import sys
from collections.abc import Sequence

from edge.system.kind import PORTABLE
from edge.system.pages import HUGE_PAGE_BYTES, address_of, advise_at, mapped

_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


class PageSupply:
    """Pages for one program's parts, which `memory_over` made. Not thread-safe.

    Pages move on Linux alone; elsewhere each part keeps its own.
    """

    def __init__(self) -> None:
        self._moves_pages = sys.platform == "linux" and not PORTABLE
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
            is_supplied = address in self._supplied or not self._moves_pages
            if nbytes < HUGE_PAGE_BYTES and not is_supplied:
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
                    advise_at(address, nbytes, "drop")

    def close(self) -> None:
        """Free the rest of the current huge page. May be called again."""
        if self._end > self._next:
            _unmap(self._next, self._end)
        self._next = self._end = 0

    def _cut(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Cut `nbytes` from huge pages for this address. Returns the bytes from each page."""
        sizes: list[int] = []
        while (left := nbytes - sum(sizes)) > 0:
            if self._next == self._end and not self._new_page():
                break
            size = min(left, self._end - self._next)
            flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
            if not _remap(self._next, address + sum(sizes), size, flags):
                break
            self._next += size
            sizes.append(size)
        return tuple(sizes) if sum(sizes) == nbytes else (*sizes, nbytes - sum(sizes))

    def _new_page(self) -> bool:
        size = 2 * HUGE_PAGE_BYTES
        start = mapped(None, size)
        if start is None:
            return False
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = first + HUGE_PAGE_BYTES
        for low, high in ((start, first), (last, start + size)):
            if high > low:
                _unmap(low, high)
        advise_at(first, HUGE_PAGE_BYTES, "huge")
        ctypes.memset(first, 0, HUGE_PAGE_BYTES)  # allocates it as one huge page
        self._next, self._end = first, last
        return True

    def _move(self, address: int, target: int, sizes: Sequence[int]) -> bool:
        if not self._moves_pages:
            return False
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        done = 0
        for size in sizes:
            if not _remap(address + done, target + done, size, flags):
                return False
            done += size
        return True


def want_huge_pages(parts: Sequence[memoryview]) -> None:
    """Ask for huge pages in parts that `memory_over` made."""
    for part in parts:
        advise_at(address_of(part), part.nbytes, "huge")


def _remap(address: int, target: int, nbytes: int, flags: int) -> bool:
    libc = ctypes.CDLL(None)
    libc.mremap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(nbytes)
    moved = libc.mremap(ctypes.c_void_p(address), size, size, flags, ctypes.c_void_p(target))
    return bool(moved == target)


def _unmap(start: int, end: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start))


def _ranges(part: memoryview) -> list[tuple[int, int]]:
    """(address, bytes) of the whole huge pages of a part, if any, and of the rest."""
    address = address_of(part)
    if address % HUGE_PAGE_BYTES:
        return [(address, part.nbytes)]
    whole = part.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    found = [(address, whole), (address + whole, part.nbytes - whole)]
    return [(start, nbytes) for start, nbytes in found if nbytes]
