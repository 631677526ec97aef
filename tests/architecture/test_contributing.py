"""CONTRIBUTING.md shows tests as they stand in the repository, and names helpers that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tests.support
from tests.architecture.test_names import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^`(tests/[\w/]+\.py)`\n\n```python\n(.*?)```$", PAGE, re.M | re.S)
"""A file, and the code that the page shows of it."""

KINDS = (
    "unit",
    "unit/scheduling",
    "support",
    "unit/runs",
    "multiprocess",
    "unit/server",
    "property",
)


@pytest.mark.parametrize(("file", "code"), EXAMPLES, ids=[file for file, _code in EXAMPLES])
def test_an_example_is_code_that_the_tests_run(file: str, code: str) -> None:
    assert code.strip() in (REPOSITORY / file).read_text(encoding="utf-8"), f"{file} has changed"


def test_every_kind_of_test_has_an_example_and_every_block_is_one() -> None:
    assert [Path(file).parent.as_posix() for file, _code in EXAMPLES] == [
        f"tests/{kind}" for kind in KINDS
    ]
    assert PAGE.count("```python") == len(EXAMPLES)


def test_the_index_of_helpers_names_each_of_them_once() -> None:
    folder = Path(tests.support.__file__).parent
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    named = re.findall(r"`(\w+)`", tests.support.__doc__ or "")
    assert sorted(named) == modules
