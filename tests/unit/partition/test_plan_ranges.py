"""Cutting rows of things into ranges, by tables."""

import math

import pytest

from edge.partition import kv_heads, split_by_shares
from edge.partition.plan.ranges import apportion, kv_group_size, largest_remainders


@pytest.mark.parametrize(
    ("total", "shares", "multiple", "sizes"),
    [
        (10, (1, 1), 1, (5, 5)),
        (10, (3, 1), 1, (8, 2)),  # 7.5 and 2.5: of equal remainders the first wins
        (10, (1, 0, 1), 1, (5, 0, 5)),
        (10, (0.5, 0.25, 0.25), 1, (5, 3, 2)),
        (0, (1, 2), 1, (0, 0)),
        (128, (1, 1, 1), 32, (64, 32, 32)),
        (100, (1, 1), 32, (64, 36)),  # 3 whole multiples, and the last takes the rest
        (100, (1, 1, 0), 32, (64, 36, 0)),
        (20, (1, 1), 32, (0, 20)),
        (7, (1,), 4, (7,)),
    ],
)
def test_split_by_shares(
    total: int, shares: tuple[float, ...], multiple: int, sizes: tuple[int, ...]
) -> None:
    ranges = split_by_shares(total, shares, multiple)
    assert tuple(map(len, ranges)) == sizes
    assert [index for part in ranges for index in part] == list(range(total))


def test_equal_shares() -> None:
    assert split_by_shares(10, (1, 1, 1)) == (range(4), range(4, 7), range(7, 10))
    assert split_by_shares(96, (1, 1), 32) == (range(64), range(64, 96))


@pytest.mark.parametrize(
    ("total", "shares", "multiple"),
    [
        (-1, (1,), 1),
        (1, (1,), 0),
        (1, (), 1),
        (1, (0, 0), 1),
        (1, (1, -1), 1),
        (1, (1, math.inf), 1),
        (1, (1, math.nan), 1),
    ],
)
def test_split_refuses(total: int, shares: tuple[float, ...], multiple: int) -> None:
    with pytest.raises(ValueError, match=r"Cannot cut|[Ss]hare"):
        split_by_shares(total, shares, multiple)


def test_largest_remainders_need_a_share() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        largest_remainders(3, (0, 0))


@pytest.mark.parametrize(
    ("total", "shares", "least", "most", "counts"),
    [
        (10, (1, 1), (0, 0), (10, 10), [5, 5]),
        (10, (1, 1), (0, 0), (2, 10), [2, 8]),
        (10, (9, 1), (0, 3), (10, 10), [7, 3]),
        (10, (8, 1, 1), (0, 0, 0), (4, 10, 10), [4, 3, 3]),
        (10, (8, 1, 1), (0, 4, 0), (5, 10, 10), [5, 4, 1]),
        (10, (1, 1), (0, 0), (4, 5), None),  # not enough room
        (3, (1, 1), (2, 2), (5, 5), None),  # not enough to give
        (3, (1, 1), (2, 0), (1, 5), None),  # limits that contradict each other
    ],
)
def test_apportion(
    total: int,
    shares: tuple[int, ...],
    least: tuple[int, ...],
    most: tuple[int, ...],
    counts: list[int] | None,
) -> None:
    assert apportion(total, shares, least=least, most=most) == counts


@pytest.mark.parametrize(
    ("heads", "num_heads", "num_kv_heads", "expected"),
    [
        (range(0, 8), 8, 2, (0, 1)),
        (range(4, 8), 8, 2, (1,)),
        (range(0, 6), 8, 2, (0, 0, 1)),
        (range(3, 5), 8, 2, (0, 1)),
        (range(1, 3), 8, 2, (0,)),
        (range(2, 8), 8, 2, (0, 1, 1)),
        (range(3, 6), 8, 2, (0, 1, 1)),
        (range(0, 3), 8, 1, (0,)),  # multi-query: never more than one
        (range(2, 5), 8, 8, (2, 3, 4)),  # multi-head: one each
        (range(2, 14), 16, 4, (0, 1, 1, 2, 2, 3)),
        (range(5, 5), 8, 2, ()),
    ],
)
def test_kv_heads(
    heads: range, num_heads: int, num_kv_heads: int, expected: tuple[int, ...]
) -> None:
    assert kv_heads(heads, num_heads, num_kv_heads) == expected


@pytest.mark.parametrize(
    ("heads", "num_heads", "num_kv_heads"),
    [
        (range(7, 9), 8, 2),
        (range(-1, 2), 8, 2),
        (range(0, 8, 2), 8, 2),
        (range(0, 2), 8, 3),
        (range(0, 2), 8, 0),
    ],
)
def test_kv_heads_refuses(heads: range, num_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(ValueError, match="heads"):
        kv_heads(heads, num_heads, num_kv_heads)


def test_no_heads_have_no_group() -> None:
    assert kv_group_size(range(0), 8, 2) == 0
