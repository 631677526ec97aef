"""Which tokens quality is measured on, and texts that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edge.errors import RequestError
from edge.studies.text_windows import bundled_text, read_text, windows_of

BEGIN, END = 1, 2


def encoder(before: Sequence[int] = (), after: Sequence[int] = ()) -> Callable[[str], list[int]]:
    """A token for each character, and what stands around every text."""
    return lambda text: [*before, *map(ord, text), *after]


@pytest.mark.parametrize("after", [(), (END,)])
@pytest.mark.parametrize("before", [(), (BEGIN,), (BEGIN, BEGIN)])
def test_every_window_begins_as_a_prompt_does(before: Sequence[int], after: Sequence[int]) -> None:
    text = "".join(map(chr, range(40, 90)))
    found = windows_of(encoder(before, after), text, windows=4, window_tokens=12)
    fresh = 12 - len(before)
    assert [len(window) for window in found] == [12] * 4
    assert all(window[: len(before)] == tuple(before) for window in found)
    read = [token for window in found for token in window[len(before) :]]
    assert read == [ord(character) for character in text[: 4 * fresh]]


def test_a_text_that_is_just_long_enough() -> None:
    assert len(windows_of(encoder(after=(END,)), "x" * 30, windows=3, window_tokens=10)) == 3
    with pytest.raises(RequestError, match="29 tokens, and 3 windows of 10 need 30; give a longer"):
        windows_of(encoder(after=(END,)), "x" * 29, windows=3, window_tokens=10)


def test_an_empty_text_is_too_short() -> None:
    with pytest.raises(RequestError, match="the text has 0 tokens"):
        windows_of(encoder((BEGIN,)), "", windows=1, window_tokens=10)


def test_the_bundled_text_is_plain_prose() -> None:
    text = bundled_text()
    assert len(text.split()) > 2000
    assert text.count("\n\n") > 30
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_file_is_read_as_far_as_needed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("\ufeff" + "é" * 10_000, encoding="utf-8")
    assert read_text(file, tokens=1000) == "é" * 10_000
    # 64 bytes for each token: one for three bytes of mark leaves the last character cut.
    assert read_text(file, tokens=1) == "é" * 30


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(RequestError, match=r"is not UTF-8 text \(byte 3\); save it as UTF-8"):
        read_text(file, tokens=10)
    file.write_bytes("café".encode()[:-1])
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        read_text(file, tokens=10)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_text(tmp_path, tokens=10)
