"""Arrangements of devices of which some equal each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.partition.search.arrangements import canonical, is_canonical

kinds = st.lists(st.integers(0, 2), min_size=1, max_size=7)
"""What kind each device is of; those of one kind equal each other."""


def twins_of(kinds: list[int]) -> dict[int, int]:
    return {
        later: max(earlier for earlier in range(later) if kinds[earlier] == kind)
        for later, kind in enumerate(kinds)
        if kind in kinds[:later]
    }


@given(kinds=kinds, data=st.data())
def test_equal_devices_change_places_only_among_each_other(
    kinds: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(kinds))))
    used = order[: data.draw(st.integers(1, len(order)))]
    starts = sorted({0, *data.draw(st.lists(st.integers(0, len(used) - 1), max_size=3))})
    arrangement = tuple(
        tuple(used[start:stop])
        for start, stop in zip(starts, [*starts[1:], len(used)], strict=True)
    )
    twins = twins_of(kinds)
    found = canonical(arrangement, twins)
    assert is_canonical(found, twins)
    assert canonical(found, twins) == found
    assert [[kinds[index] for index in group] for group in found] == [
        [kinds[index] for index in group] for group in arrangement
    ]
    assert len({index for group in found for index in group}) == len(used)
