"""What `scripts/test` leaves out shows nothing that it does not show otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slow_cases import every_pair, repeats_are_slow, shown_in_parts

TESTS = Path(__file__).parents[1]


def test_only_repetitions_are_marked() -> None:
    mark = "mark." + "slow"
    marked = {
        str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py") if mark in file.read_text()
    }
    assert marked == {"support/slow_cases.py"}


def test_each_value_stays_and_no_case_goes() -> None:
    cases = every_pair("abcd", [1, 2, 3], ["x", "y"])
    marked = repeats_are_slow(cases)
    assert [tuple(getattr(case, "values", case)) for case in marked] == cases
    kept = [case for case in marked if not hasattr(case, "marks")]
    assert [set(values) for values in zip(*kept, strict=True)] == [
        set("abcd"),
        {1, 2, 3},
        {"x", "y"},
    ]
    assert len(kept) == 4, "as few as there are values of one parameter"


def test_parameters_that_are_tested_elsewhere_do_not_count() -> None:
    marked = repeats_are_slow([("a", 1), ("b", 1), ("c", 2)], of=[1])
    assert [hasattr(case, "marks") for case in marked] == [False, True, False]


def test_who_tests_the_whole_says_where_its_parts_are_tested() -> None:
    assert shown_in_parts("architecture/test_slow_cases.py").name == "slow"
    with pytest.raises(AssertionError, match=r"no such tests: .*nowhere"):
        shown_in_parts("architecture/test_slow_cases.py", "nowhere/test_nothing.py")
    with pytest.raises(AssertionError, match="which tests"):
        shown_in_parts()
