"""What an image is built of is what git has."""

from __future__ import annotations

from tests.architecture.test_names import REPOSITORY


def test_what_git_ignores_is_in_no_image() -> None:
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    left_out = (REPOSITORY / ".dockerignore").read_text().splitlines()
    names = {line.removeprefix("**/") for line in left_out if not line.startswith("#")}
    assert {name.rstrip("/") for name in ignored} <= names
    assert ".git" in names
