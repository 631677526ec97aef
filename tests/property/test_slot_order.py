"""Who lies where in a pool, and how few have to move."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edge.offload.kv.slot_order import SlotOrder

NAMES = "abcdef"


def order_of(names: str) -> SlotOrder:
    order = SlotOrder()
    for name in names:
        order.open(name)
    return order


def swapped(names: str, swaps: tuple[tuple[int, int], ...]) -> str:
    found = list(names)
    for one, other in swaps:
        found[one], found[other] = found[other], found[one]
    return "".join(found)


names = st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map("".join)


@given(there=names, at_end=st.booleans(), data=st.data())
def test_those_gathered_lie_side_by_side_in_their_order(
    there: str, at_end: bool, data: st.DataObject
) -> None:
    wanted = data.draw(st.permutations(there))[: data.draw(st.integers(1, len(there)))]
    order = order_of(there)
    first, swaps = order.gather(wanted, at_end=at_end)
    now = "".join(order)
    assert now[first : first + len(wanted)] == "".join(wanted)
    assert now == swapped(there, swaps)
    assert not at_end or first + len(wanted) == len(there)
    assert order.gather(wanted, at_end=at_end) == (first, ())


@given(there=names, data=st.data())
def test_no_order_of_a_batch_moves_fewer(there: str, data: st.DataObject) -> None:
    """Newcomers get their slots at the end first."""
    wanted = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    arranged = order_of(there).arranged(wanted)
    assert sorted(arranged) == sorted(wanted)

    def moves(batch: list[str]) -> int:
        order = order_of(there)
        for name in batch:
            order.open(name)
        return len(order.gather(batch).swaps)

    assert moves(arranged) == min(moves(list(each)) for each in itertools.permutations(wanted))


def test_the_last_moves_into_a_hole() -> None:
    order = order_of("abcd")
    order.release("b")
    order.release("x")
    assert list(order) == ["a", "d", "c"]
    order.release("c")
    order.rename("a", "e")
    assert list(order) == ["e", "d"]
