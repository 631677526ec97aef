"""Weights of which each step uses some: those are in memory, and never more than may be."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.offload import ExpertCache, Memory, StoreError
from tests.support.streamed_extents import GONE, PAGE, MemoryReader, content_of, page_memory, spans

COUNT = 6
"""Units of a group."""

CAPACITIES = st.integers(1, 3 * COUNT)


BESIDE = PAGE // 4
"""What a place takes beside its memory."""


class OwnPlace:
    """Of one kind; what is emptied is overwritten, so that a use of it is noticed."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.memory = [page_memory(PAGE)]


class Places:
    """All that were opened, and how many of them are not closed."""

    def __init__(self) -> None:
        self.opened = 0
        self._open: weakref.WeakSet[OwnPlace] = weakref.WeakSet()

    def open(self, kind: int) -> OwnPlace:
        place = OwnPlace(kind)
        self.opened += 1
        self._open.add(place)
        return place

    def supply(self, memory: Memory) -> None:
        assert memory[0].nbytes == PAGE

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        assert to is None
        memory[0][:] = GONE * PAGE

    def taken(self) -> int:
        """Bytes, as far as one byte tells whether there is something."""
        filled = sum(place.memory[0][0] not in (0, GONE[0]) for place in self._open)
        return filled * PAGE + len(self._open) * BESIDE


WHOLE = PAGE + BESIDE


def cache_of(
    places: Places, reader: MemoryReader, *, groups: int, units: int, kinds: int = 1
) -> ExpertCache[OwnPlace]:
    """With room for so many units."""
    extents = spans(groups * COUNT, PAGE)
    return ExpertCache(
        [extents[group * COUNT :][:COUNT] for group in range(groups)],
        [group % kinds for group in range(groups)],
        places.open,
        reader,
        capacity_bytes=units * WHOLE,
        place_bytes=BESIDE,
        pages=places,
    )


def use(
    cache: ExpertCache[OwnPlace], group: int, units: Sequence[int], tokens: int = 1
) -> list[int]:
    """In the order of their runs."""
    rows = [int(unit in units) for unit in range(COUNT)]
    return [unit for run in cache.runs(group, rows, tokens=tokens) for unit, _place in run]


@given(
    groups=st.integers(1, 3),
    kinds=st.integers(1, 2),
    for_good=st.booleans(),
    capacities=st.lists(CAPACITIES, min_size=1, max_size=4),
    uses=st.lists(st.sets(st.integers(0, COUNT - 1)), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_every_use_finds_its_unit_however_little_room_there_is(
    groups: int, kinds: int, for_good: bool, capacities: list[int], uses: list[set[int]]
) -> None:
    """In runs that fit, in places of its kind; the room changes between steps, and in the middle of
    them."""
    reader = MemoryReader(content_of(groups * COUNT, PAGE))
    places = Places()
    cache = cache_of(places, reader, groups=groups, units=capacities[0], kinds=kinds)
    try:
        for number, wanted in enumerate(uses):
            group, room = number % groups, capacities[number % len(capacities)]
            cache.keep(room * WHOLE, for_good=for_good)
            assert places.taken() <= cache.held_bytes <= room * WHOLE

            def use_all(group: int, wanted: set[int], room: int) -> list[int]:
                found: list[int] = []
                rows = [int(unit in wanted) for unit in range(COUNT)]
                for run in cache.runs(group, rows, tokens=1):
                    assert run
                    for unit, place in run:
                        assert place.kind == group % kinds
                        content = bytes([group * COUNT + unit + 1]) * PAGE
                        assert bytes(place.memory[0]) == content
                    assert places.taken() <= cache.held_bytes <= room * WHOLE
                    found += [unit for unit, _place in run]
                return found

            assert use_all(group, wanted, room) == sorted(wanted)
            cache.keep(WHOLE, for_good=for_good)
            assert places.taken() <= cache.held_bytes <= WHOLE
        assert cache.uses == sum(map(len, uses))
    finally:
        cache.close()
        reader.close()


def test_units_that_tokens_use_stay_though_others_are_used_in_between() -> None:
    """The last used one would have to go with every use of two groups in turn."""
    reader = MemoryReader(content_of(2 * COUNT, PAGE))
    cache = cache_of(Places(), reader, groups=2, units=5)
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
    cache = cache_of(Places(), reader, groups=2, units=2 * COUNT)
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
    cache = cache_of(Places(), reader, groups=3, units=2 * COUNT)
    try:
        use(cache, 0, range(COUNT), tokens=8)
        use(cache, 1, range(COUNT), tokens=8)
        before = cache.reads
        use(cache, 2, range(COUNT), tokens=8)
        assert cache.reads == before
    finally:
        cache.close()
        reader.close()


def test_places_go_from_unit_to_unit_and_stay_open_while_memory_is_lent_and_taken_back() -> None:
    reader, places = MemoryReader(content_of(2 * COUNT, PAGE)), Places()
    cache = cache_of(places, reader, groups=2, units=4)
    try:
        for step in range(30):
            cache.keep((3 + step % 2) * WHOLE, for_good=False)
            for group in range(2):
                use(cache, group, [step % COUNT, (step + 3) % COUNT])
        assert places.opened == 4
        assert cache.reads > 30
        cache.keep(2 * WHOLE)
        assert places.taken() == cache.held_bytes == 2 * WHOLE
        cache.keep(4 * WHOLE)
        use(cache, 0, range(COUNT))
        assert places.opened == 6
    finally:
        cache.close()
        reader.close()


def test_a_disk_that_fails_is_told_at_the_use_and_from_then_on() -> None:
    reader = MemoryReader(content_of(COUNT, PAGE))
    cache = cache_of(Places(), reader, groups=1, units=1)
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
    cache = cache_of(Places(), reader, groups=1, units=2)
    cache.close()
    reader.close()
    with pytest.raises(StoreError, match="was closed"):
        use(cache, 0, [0])
