"""Cutting rows of things into ranges: exact tiling, fair sizes, the right KV heads."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge.partition import kv_heads, split_by_shares
from edge.partition.plan.ranges import apportion
from tests.property.plan_situations import PLANS


@PLANS
@given(st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1), st.integers(1, 64))
def test_splits_tile_exactly_and_in_proportion(
    total: int, shares: list[int], multiple: int
) -> None:
    assume(any(shares))
    ranges = split_by_shares(total, shares, multiple)
    assert [index for part in ranges for index in part] == list(range(total))
    for part, share in zip(ranges, shares, strict=True):
        assert part.start % multiple == 0 or part.start == total
        assert share or not part
        assert abs(len(part) - Fraction(total * share, sum(shares))) < 2 * multiple
    if multiple == 1:
        for part, share in zip(ranges, shares, strict=True):
            assert abs(len(part) - Fraction(total * share, sum(shares))) < 1


@PLANS
@given(
    st.integers(0, 300),
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9),
    st.integers(1, 40),
)
def test_splits_by_measured_shares_tile_too(total: int, shares: list[float], multiple: int) -> None:
    assume(any(shares))
    ranges = split_by_shares(total, shares, multiple)
    assert [index for part in ranges for index in part] == list(range(total))
    assert not any(part for part, share in zip(ranges, shares, strict=True) if share == 0)


@PLANS
@given(st.integers(0, 500), st.integers(1, 12), st.integers(1, 9))
def test_even_splits_differ_by_one_multiple_and_the_rest(
    total: int, parts: int, multiple: int
) -> None:
    sizes = [len(part) for part in split_by_shares(total, (1,) * parts, multiple)]
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= multiple + total % multiple


@PLANS
@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 12), st.integers(0, 30)),
        min_size=1,
        max_size=6,
    ),
)
def test_apportioning_keeps_to_the_limits_or_says_it_cannot(
    total: int, parts: list[tuple[int, int, int]]
) -> None:
    shares, least, most = (list(column) for column in zip(*parts, strict=True))
    counts = apportion(total, shares, least=least, most=most)
    possible = all(low <= high for low, high in zip(least, most, strict=True)) and (
        sum(least) <= total <= sum(most)
    )
    assert (counts is not None) == possible
    if counts is not None:
        assert sum(counts) == total
        assert all(
            low <= count <= high for low, count, high in zip(least, counts, most, strict=True)
        )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6])
def test_local_attention_is_plain_and_reads_the_right_heads(num_kv_heads: int, group: int) -> None:
    """Every run of heads there is: few enough to need no sampling."""
    num_heads = num_kv_heads * group
    for start, stop in itertools.combinations(range(num_heads + 1), 2):
        heads = range(start, stop)
        held = kv_heads(heads, num_heads, num_kv_heads)
        size, rest = divmod(len(heads), len(held))
        assert rest == 0
        for local, head in enumerate(heads):
            assert held[local // size] == head // group
        # And no larger size would do.
        for larger in range(size + 1, len(heads) + 1):
            runs = [heads[at : at + larger] for at in range(0, len(heads), larger)]
            one_each = all(len({head // group for head in run}) == 1 for run in runs)
            assert len(heads) % larger or not one_each


def test_shares_far_apart_stay_exact() -> None:
    # Floats would lose the small share beside the large one.
    ranges = split_by_shares(10, (1e300, 1e-300, 1e300))
    assert [len(part) for part in ranges] == [5, 0, 5]
