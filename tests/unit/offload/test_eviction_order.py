"""What is worth least goes first: by its cost, and by when it was of use."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from edge.offload.kv.eviction_order import EvictionOrder


def ordered(**costs: float) -> EvictionOrder:
    order = EvictionOrder()
    for key, cost in costs.items():
        order.use(key, cost)
    return order


def test_what_costs_least_goes_first_and_of_equals_the_oldest() -> None:
    order = ordered(a=2.0, b=1.0, c=3.0, d=1.0)
    assert list(order) == ["b", "d", "a", "c"]
    assert order.first() == "b"
    order.use("b", 1.0)
    assert list(order) == ["d", "b", "a", "c"]
    order.use("a", 0.5)
    assert list(order) == ["d", "b", "a", "c"], "it is worth no less than before"


def test_nothing_stays_for_ever() -> None:
    """What is dear and never used goes after so much that is cheap and new."""
    order = ordered(dear=10.0)
    went = []
    for number in range(30):
        order.use(f"{number}", 1.0)
        if number >= 2:
            went.append(order.first())
            order.evict(went[-1])
    assert "dear" in went
    assert went.index("dear") >= 10


def test_what_did_not_make_room_makes_nothing_older() -> None:
    order = ordered(a=5.0)
    order.forget("a")
    order.use("b", 1.0)
    order.use("c", 2.0)
    assert list(order) == ["b", "c"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 9)), max_size=60),
    st.floats(0, 9),
)
def test_where_costs_are_alike_it_is_by_use_alone(
    uses: list[tuple[str, float]], cost: float
) -> None:
    order, by_use = EvictionOrder(), OrderedDict[str, None]()
    for key, action in uses:
        if action < 7 or not by_use:
            order.use(key, cost)
            by_use[key] = None
            by_use.move_to_end(key)
        else:
            assert order.first() == next(iter(by_use))
            order.evict(by_use.popitem(last=False)[0])
        assert list(order) == list(by_use)
