"""Fewer cases where two kinds of variants do not know of each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def every_pair(first: Iterable[A], second: Iterable[B], third: Iterable[C]) -> list[tuple[A, B, C]]:
    """Every pair of the first two, each once, with the third in turn.

    Where neither of them is shorter than the third, all pairs with it are among the cases, too.
    """
    thirds = list(third)
    return [
        (a, b, thirds[(i + j) % len(thirds)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
