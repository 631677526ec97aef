"""Parsers of tool calls with JSON-like values: Python literals, and Gemma's own quotes.

    f(a=1, b='it\\'s', c=[True, None], d={"e": 2.5})        calls as in Python
    call:f{a:1,b:<|"|>it's<|"|>,c:[true,null],d:{e:2.5}}    Gemma 4

Nothing is evaluated. Raises ValueError for invalid values, and for more than 32 levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from edge.text.answer_parts import ToolCall
from edge.text.tool_types import finite

_MOST_DEPTH = 32

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"(?:true|false|null|True|False|None)(?![A-Za-z0-9_])")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}

_ENDS = r"(?=[ \t\r\n]*+(?:[,)\]}:]|\Z))"
"""The text behind a closing quote. Templates do not escape quotes, so other quotes are text."""
_QUOTED = re.compile(
    rf"""'((?>[^'\\]+|\\.|'(?!{_ENDS}))*+)'|"((?>[^"\\]+|\\.|"(?!{_ENDS}))*+)\"""",
    re.DOTALL,
)
_QUOTE = '<|"|>'
_NAME = re.compile(r"[^\s:=(){}\[\],\"'<>]{1,256}")

_ESCAPE = re.compile(
    r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^uUx])",
    re.DOTALL,
)
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip


def python_calls(text: str) -> list[ToolCall] | None:
    """The calls of a Python list of calls; None: it is none."""
    reader, found = _Reader(text), []
    try:
        reader.take("[")
        for _ in reader.items("]"):
            found.append(reader.call())
    except ValueError:
        return None
    return found if found and reader.is_over() else None


def python_lines(text: str) -> list[ToolCall] | None:
    """Consecutive Python calls, such as lines; None: it is none."""
    reader, found = _Reader(text), []
    try:
        while not reader.is_over():
            found.append(reader.call())
    except ValueError:
        return None
    return found or None


def gemma_call(text: str) -> list[ToolCall] | None:
    """The call in Gemma's format; None: it is none."""
    reader = _Reader(text)
    try:
        reader.take("call:")
        name = reader.name()
        reader.take("{")
        call = ToolCall(name=name, arguments=reader.pairs(":", "}", 0))
    except ValueError:
        return None
    return [call] if reader.is_over() else None


class _Reader:
    """A text and the reading position."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def is_over(self) -> bool:
        self._skip_space()
        return self._place == len(self._text)

    def has(self, mark: str) -> bool:
        """Read the mark if it comes next, and return whether it did."""
        self._skip_space()
        if not self._text.startswith(mark, self._place):
            return False
        self._place += len(mark)
        return True

    def take(self, mark: str) -> None:
        if not self.has(mark):
            raise ValueError(f"{mark} is missing at {self._place}")

    def name(self) -> str:
        self._skip_space()
        return self._matched(_NAME)[0]

    def call(self) -> ToolCall:
        """Read a Python call."""
        name = self.name()
        self.take("(")
        return ToolCall(name=name, arguments=self.pairs("=", ")", 0))

    def items(self, close: str) -> Iterator[None]:
        """Yield before each item up to `close`; a trailing comma is allowed."""
        while not self.has(close):
            yield
            if not self.has(","):
                self.take(close)
                return

    def pairs(self, between: str, close: str, depth: int) -> dict[str, Any]:
        found = {}
        for _ in self.items(close):
            key = self._quoted()
            if key is None:
                key = self.name()
            self.take(between)
            found[key] = self.value(depth)
        return found

    def value(self, depth: int) -> Any:
        if depth == _MOST_DEPTH:
            raise ValueError("it has too many levels")
        if self.has("["):
            return [self.value(depth + 1) for _ in self.items("]")]
        if self.has("{"):
            return self.pairs(":", "}", depth + 1)
        if (text := self._quoted()) is not None:
            return text
        if (word := _WORD.match(self._text, self._place)) is not None:
            self._place = word.end()
            return _WORDS[word[0]]
        number = self._matched(_NUMBER)
        return int(number[0]) if number[1] is number[2] is None else finite(number[0])

    def _quoted(self) -> str | None:
        if self.has(_QUOTE):
            end = self._text.find(_QUOTE, self._place)
            if end < 0:
                raise ValueError("a text has no end")
            text, self._place = self._text[self._place : end], end + len(_QUOTE)
            return text
        if not self._text.startswith(("'", '"'), self._place):
            return None
        quoted = self._matched(_QUOTED)
        return _ESCAPE.sub(_unescaped, quoted[1] if quoted[1] is not None else quoted[2])

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._place)
        if found is None:
            raise ValueError(f"something else at {self._place}")
        self._place = found.end()
        return found

    def _skip_space(self) -> None:
        self._place = self._matched(_SPACE).end()


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if len(code) == 1:  # Python keeps unknown escapes
        return escape[0]
    high, _, low = code[1:].partition("\\u")
    if low:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    letter = chr(int(high, 16))
    return "\ufffd" if "\ud800" <= letter <= "\udfff" else letter
