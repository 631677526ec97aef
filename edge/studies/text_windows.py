"""The text of a study, bundled or from a file, and its windows of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from edge.errors import RequestError

MAX_TEXT_BYTES = 64 << 20
"""Most bytes that are read of a file; the rest is ignored."""

_BYTES_PER_TOKEN = 64
"""Bytes that are read of a file per token: several times a token's size in any language."""


def bundled_text() -> str:
    """The bundled text: seven short pieces of English prose, about 2,600 tokens for most models."""
    return (files("edge.text") / "prose.txt").read_text(encoding="utf-8")


def read_text(path: Path, *, tokens: int) -> str:
    """The beginning of a UTF-8 file, long enough for that many tokens if the file is.

    Raises RequestError for a file that cannot be read, or is not UTF-8.
    """
    limit = min(MAX_TEXT_BYTES, _BYTES_PER_TOKEN * tokens)
    try:
        with path.open("rb") as file:
            content = file.read(limit)
        # The cut may split a character.
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content, len(content) < limit)
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror})", remedy="give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8 text (byte {error.start})",
            remedy="save it as UTF-8, or give another file",
        ) from error


def windows_of(
    encode: Callable[[str], Sequence[int]], text: str, *, windows: int, window_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The first tokens of a text, in windows of equal length, one after the other.

    Each window begins with the special tokens that `encode` puts before a text, as a prompt does.
    Raises RequestError for a text that is too short.
    """
    prefix, body = _without_special_tokens(encode(text), encode(""))
    fresh = window_tokens - len(prefix)
    if fresh < 2:
        raise RequestError(
            f"windows of {window_tokens} tokens have no room for text", remedy="make them longer"
        )
    if len(body) < windows * fresh:
        raise RequestError(
            f"the text has {len(body)} tokens, and {windows} windows of {window_tokens} need "
            f"{windows * fresh}",
            remedy="give a longer text, or fewer or shorter windows",
        )
    return tuple(
        (*prefix, *body[begin : begin + fresh]) for begin in range(0, windows * fresh, fresh)
    )


def most_windows(encode: Callable[[str], Sequence[int]], text: str, window_tokens: int) -> int:
    """The number of windows of this length that `windows_of` finds in a text."""
    prefix, body = _without_special_tokens(encode(text), encode(""))
    return len(body) // max(1, window_tokens - len(prefix))


def _without_special_tokens(
    whole: Sequence[int], empty: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(The special tokens before a text, the tokens of the text alone).

    whole: the tokens of the text with special tokens around it. empty: those of an empty text.
    """
    before = 0
    while before < min(len(empty), len(whole)) and empty[before] == whole[before]:
        before += 1
    after = len(empty) - before
    end = len(whole)
    if after and tuple(whole[-after:]) == tuple(empty[before:]):
        end -= after
    return tuple(whole[:before]), tuple(whole[before:end])
