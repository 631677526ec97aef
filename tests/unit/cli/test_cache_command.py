"""What `edge cache clean` chooses, and how ages are written and read."""

from __future__ import annotations

import pytest

from edge.cli.commands.cache import age_in_words, chosen, parse_age
from edge.errors import RequestError
from edge.protocol.kept_files import KeptFiles


def files(name: str, *, model: str | None, days: float, in_use: bool = False) -> KeptFiles:
    return KeptFiles(
        kind="shards", name=name, model=model, bytes=1, unused_s=days * 86400.0, in_use=in_use
    )


ALL = (
    files("old", model="org/one", days=50),
    files("new", model="org/one", days=1),
    files("other", model=None, days=50),
    files("busy", model="org/one", days=50, in_use=True),
)


@pytest.mark.parametrize(
    ("age", "model", "going"),
    [
        ("0d", None, ["old", "new", "other"]),
        ("30d", None, ["old", "other"]),
        ("0m", "ORG/one", ["old", "new"]),
        ("4w", "org/one", ["old"]),
        ("100d", None, []),
        ("0d", "org/two", []),
    ],
)
def test_what_goes(age: str, model: str | None, going: list[str]) -> None:
    assert [each.name for each in chosen(ALL, least_s=parse_age(age), model=model)] == going


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5d", "3 years", "9999999d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(RequestError, match="is no age; write 12h, 30d or 4w"):
        parse_age(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "now"),
        (119, "now"),
        (150, "2 minutes ago"),
        (7200, "2 hours ago"),
        (8.6e6, "100 days ago"),
    ],
)
def test_ages(seconds: float, words: str) -> None:
    assert age_in_words(seconds) == words
