"""Weights of which each step uses some: those are in memory, and never more than may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.offload import StoreError, UnitCache
from tests.support.pages import PAGE
from tests.support.streamed_extents import MemoryReader, Places, content_of, spans

COUNT = 6
"""Units of a group."""

CAPACITIES = st.integers(1, 3 * COUNT)


def cache_of(places: Places, reader: MemoryReader, *, groups: int, units: int) -> UnitCache:
    """With room for so many units."""
    extents = spans(groups * COUNT, PAGE)
    return UnitCache(
        [extents[group * COUNT :][:COUNT] for group in range(groups)],
        [places.memory[group * COUNT :][:COUNT] for group in range(groups)],
        reader,
        capacity_bytes=units * PAGE,
        pages=places,
    )


def use(cache: UnitCache, group: int, units: Sequence[int], tokens: int = 1) -> list[int]:
    """In the order of their runs."""
    rows = [int(unit in units) for unit in range(COUNT)]
    return [unit for run in cache.runs(group, rows, tokens=tokens) for unit in run]


@given(
    groups=st.integers(1, 3),
    capacities=st.lists(CAPACITIES, min_size=1, max_size=4),
    uses=st.lists(st.sets(st.integers(0, COUNT - 1)), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_every_use_finds_its_unit_however_little_room_there_is(
    groups: int, capacities: list[int], uses: list[set[int]]
) -> None:
    """In runs that fit; the room changes between steps, and in the middle of them."""
    reader = MemoryReader(content_of(groups * COUNT, PAGE))
    places = Places(groups * COUNT)
    cache = cache_of(places, reader, groups=groups, units=capacities[0])
    try:
        for number, wanted in enumerate(uses):
            group, room = number % groups, capacities[number % len(capacities)]
            cache.keep(room * PAGE)
            assert cache.held_bytes <= room * PAGE
            found: list[int] = []
            rows = [int(unit in wanted) for unit in range(COUNT)]
            for run in cache.runs(group, rows, tokens=1):
                assert run
                for unit in run:
                    place = group * COUNT + unit
                    assert bytes(places.memory[place][0]) == bytes([place + 1]) * PAGE
                assert cache.held_bytes <= room * PAGE
                assert len(places.held()) <= room
                found += run
            assert found == sorted(wanted)
            cache.keep(PAGE)
            assert cache.held_bytes <= PAGE
        assert cache.uses == sum(map(len, uses))
    finally:
        cache.close()
        reader.close()


def test_units_that_tokens_use_stay_though_others_are_used_in_between() -> None:
    """The last used one would have to go with every use of two groups in turn."""
    reader = MemoryReader(content_of(2 * COUNT, PAGE))
    cache = cache_of(Places(2 * COUNT), reader, groups=2, units=5)
    try:
        for step in range(40):
            if step == 20:
                reads = cache.reads
            for group in range(2):
                use(cache, group, [1, 4, step % COUNT])
        assert cache.reads - reads <= 20 * 2  # no more than the ones that are seldom used
    finally:
        cache.close()
        reader.close()


def test_as_many_as_there_is_room_for_are_read_before_they_are_used() -> None:
    reader = MemoryReader(content_of(2 * COUNT, PAGE))
    cache = cache_of(Places(2 * COUNT), reader, groups=2, units=2 * COUNT)
    try:
        for group in range(2):
            assert use(cache, group, range(COUNT)) == list(range(COUNT))
        assert (cache.uses, cache.reads) == (2 * COUNT, 0)
        assert reader.bytes_read == 2 * COUNT * PAGE
    finally:
        cache.close()
        reader.close()


def test_who_uses_all_of_a_group_has_the_next_one_read_meanwhile() -> None:
    reader = MemoryReader(content_of(3 * COUNT, PAGE))
    cache = cache_of(Places(3 * COUNT), reader, groups=3, units=2 * COUNT)
    try:
        use(cache, 0, range(COUNT), tokens=8)
        use(cache, 1, range(COUNT), tokens=8)
        before = cache.reads
        use(cache, 2, range(COUNT), tokens=8)
        assert cache.reads == before
    finally:
        cache.close()
        reader.close()


def test_a_disk_that_fails_is_told_at_the_use_and_from_then_on() -> None:
    reader = MemoryReader(content_of(COUNT, PAGE))
    cache = cache_of(Places(COUNT), reader, groups=1, units=1)
    try:
        use(cache, 0, [0])
        reader.failure = StoreError("the disk is gone")
        for unit in (3, 0):
            with pytest.raises(StoreError, match="the disk is gone"):
                use(cache, 0, [unit])
    finally:
        cache.close()
        reader.close()


def test_nothing_is_given_out_after_the_end() -> None:
    reader = MemoryReader(content_of(COUNT, PAGE))
    cache = cache_of(Places(COUNT), reader, groups=1, units=2)
    cache.close()
    reader.close()
    with pytest.raises(StoreError, match="was closed"):
        use(cache, 0, [0])
