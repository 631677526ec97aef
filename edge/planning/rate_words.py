"""How a predicted rate is said: with its spread, since a prediction belongs to the minute."""

from __future__ import annotations

from collections.abc import Sequence


def rate_in_words(tokens_per_s: float, span: Sequence[float]) -> str:
    """As `57–62`, or one number where nothing is spread.

    span: what slow and fast minutes would make it; `Estimate.tokens_per_s_range`.
    """
    low, high = (f"{each:.0f}" if each >= 10 else _small(each) for each in span)
    return _small(tokens_per_s) if low == high else f"{low}–{high}"


def _small(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
