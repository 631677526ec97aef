"""Which cases are slow: those that show again what others show; and fewer cases where two kinds of
variants do not know of each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

TESTS = Path(__file__).parents[1]


def shown_in_parts(*files: str) -> pytest.MarkDecorator:
    """The mark `slow` for a test of the whole of something, such as a demo or an agent's session:
    each part of it is shown by the tests of these files, given as from the folder of tests."""
    missing = [file for file in files if not (TESTS / file).is_file()]
    assert not missing, f"no such tests: {missing}"
    assert files, "which tests show its parts?"
    return pytest.mark.slow


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


def repeats_are_slow(
    cases: Iterable[Sequence[Any]], *, of: Sequence[int] | None = None
) -> list[Sequence[Any]]:
    """The cases in their order; marked as slow are those that show no value for the first time.

    So each value of each parameter is in some case without the mark. `of`: the parameters that
    count, by their places; the values of others are put to the test elsewhere.
    """
    listed = [tuple(case) for case in cases]
    places = range(len(listed[0])) if of is None else of
    values = [{(place, repr(case[place])) for place in places} for case in listed]
    kept: set[int] = set()
    missing = set().union(*values)
    while missing:
        best = max(range(len(listed)), key=lambda number: len(values[number] & missing))
        kept.add(best)
        missing -= values[best]
    return [
        case if number in kept else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(listed)
    ]
