"""A predicted rate as text, with its range, because speed varies from minute to minute."""

from __future__ import annotations

from collections.abc import Sequence


def rate_in_words(tokens_per_s: float, span: Sequence[float]) -> str:
    """The rate as `57–62`, or as one number where both ends are equal.

    span: the rates when devices are slow and fast, `Estimate.tokens_per_s_range`.
    """
    low, high = (f"{each:.0f}" if each >= 10 else _small(each) for each in span)
    return _small(tokens_per_s) if low == high else f"{low}–{high}"


def _small(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
