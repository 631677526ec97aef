"""How a predicted rate is said."""

from __future__ import annotations

import pytest

from edge.planning.rate_words import rate_in_words


@pytest.mark.parametrize(
    ("rate", "span", "said"),
    [
        (59.61, (57.2, 62.4), "57–62"),
        (59.61, (59.61, 59.61), "59.6"),
        (2.53, (2.41, 2.63), "2.4–2.6"),
        (10.2, (9.87, 10.6), "9.9–11"),
        (0.0432, (0.0411, 0.0457), "0.041–0.046"),
        (0.0432, (0.0432, 0.0432), "0.043"),
        (1240.0, (1180.4, 1301.0), "1180–1301"),
    ],
)
def test_a_rate_is_said_with_its_spread(rate: float, span: tuple[float, float], said: str) -> None:
    assert rate_in_words(rate, span) == said
