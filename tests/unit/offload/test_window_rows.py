"""Which rows a window keeps follows from the number of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edge.offload import WindowRows

SIZES = [(8, 8), (8, 12), (5, 20), (3, 4), (1, 1), (1, 5), (512, 639)]


@pytest.mark.parametrize(("window", "kept"), SIZES)
def test_all_that_the_next_token_sees_is_there(window: int, kept: int) -> None:
    rows = WindowRows(window=window, kept=kept)
    for tokens in range(3 * kept):
        assert min(tokens, window) <= rows.rows(tokens) <= min(tokens, kept)
        assert rows.first(tokens) % (kept - window + 1) == 0
    assert all(rows.first(one) <= rows.first(other) for one, other in pairwise(range(3 * kept)))


@pytest.mark.parametrize(("window", "kept"), SIZES)
def test_a_request_is_cut_where_its_rows_are_there(window: int, kept: int) -> None:
    rows = WindowRows(window=window, kept=kept)
    for position in range(0, 3 * kept, 1 + kept // 60):
        end = rows.end(position)
        assert end >= position + 2
        assert all(rows.can_cut(end, to) for to in range(position + 1, end + 1))
        assert not rows.can_cut(end + 1, position + 1)
        assert not rows.can_cut(end, end + 1)


def test_a_window_needs_its_rows() -> None:
    for window, kept in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="rows"):
            WindowRows(window=window, kept=kept)
