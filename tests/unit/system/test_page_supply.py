"""Pages that go from one part to another, with what is in them, and back to the system."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from edge.system.page_supply import PageSupply
from edge.system.pages import HUGE_PAGE_BYTES, memory_over

pytestmark = pytest.mark.linux_ways

PAGE = mmap.PAGESIZE
SIZES = (HUGE_PAGE_BYTES + 3 * PAGE, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES - PAGE, 5 * PAGE)
"""Of parts: with an end, without one, nothing but an end. The ends need more than one huge page."""


@pytest.fixture
def places() -> Iterator[list[list[memoryview]]]:
    """Three memories of parts of the same sizes, each part where a huge page may begin."""
    room = [HUGE_PAGE_BYTES * (-(-size // HUGE_PAGE_BYTES) + 1) for size in SIZES]
    with mmap.mmap(-1, 3 * sum(room) + HUGE_PAGE_BYTES) as whole:
        holder = ctypes.c_char.from_buffer(whole)
        start = -(-ctypes.addressof(holder) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        made: list[list[memoryview]] = []
        for _ in range(3):
            made.append([])
            for size, taken in zip(SIZES, room, strict=True):
                part = memory_over(start, size)
                assert part is not None
                made[-1].append(part)
                start += taken
        yield made
        del holder


def fill(memory: list[memoryview], seed: int) -> list[bytes]:
    generator = np.random.default_rng(seed)
    contents = [generator.bytes(part.nbytes) for part in memory]
    for part, content in zip(memory, contents, strict=True):
        part[:] = content
    return contents


def contents(memory: list[memoryview]) -> list[bytes]:
    return [bytes(part) for part in memory]


def resident_bytes(part: memoryview) -> int:
    """Of its pages, those that are there."""
    libc = ctypes.CDLL(None)
    found = (ctypes.c_ubyte * (part.nbytes // PAGE))()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(part)))
    assert libc.mincore(address, ctypes.c_size_t(part.nbytes), found) == 0
    return PAGE * sum(each & 1 for each in found)


def test_pages_take_what_is_in_them_along(places: list[list[memoryview]]) -> None:
    """Twice round: a part whose pages came from several huge pages gives them on, too."""
    supply = PageSupply()
    try:
        first, second, third = places
        for memory in (first, second):
            supply.supply(memory)
        expected = fill(first, 1)
        for before, after in [(first, third), (third, first), (first, third)]:
            supply.hand_on(before, after)
            supply.supply(after)
            assert contents(after) == expected
            assert [resident_bytes(part) for part in before] == [0] * len(SIZES)
        kept = fill(second, 2)
        supply.supply(first)
        assert [bytes(part[:PAGE]) for part in first[2:]] == [bytes(PAGE)] * 2
        fill(first, 3)
        assert contents(second) == kept
        assert contents(third) == expected
    finally:
        supply.close()
        supply.close()


def test_what_nobody_takes_is_given_back(places: list[list[memoryview]]) -> None:
    supply = PageSupply()
    try:
        first, second, _ = places
        supply.supply(first)
        fill(first, 1)
        supply.hand_on(first, second[:2])  # of other sizes
        assert [resident_bytes(part) for part in (*first, *second)] == [0] * 2 * len(SIZES)
        supply.supply(first)
        expected = fill(first, 2)
        assert contents(first) == expected
    finally:
        supply.close()


def test_a_part_that_was_not_supplied_is_handed_on_as_well(
    places: list[list[memoryview]],
) -> None:
    supply = PageSupply()
    first, second, _ = places
    expected = fill(first, 1)
    supply.hand_on(first, second)
    assert contents(second) == expected
    supply.close()
