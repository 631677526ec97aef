"""Lines that are typed key by key on a terminal that moves no cursor."""

from __future__ import annotations

import pytest

from edge.cli.chat.long_lines import TypedLine


def typed(*parts: bytes) -> tuple[TypedLine, bytes, bytes]:
    """The line, what was shown, and what is left of the keys."""
    line = TypedLine(erase=b"\x7f", kill=b"\x15", end=b"\x04")
    shown = rest = b""
    for part in parts:
        more, rest = line.take(part)
        shown += more
    return line, shown, rest


@pytest.mark.parametrize(
    ("parts", "text", "shown", "rest"),
    [
        ((b"Hello\nand more\n",), b"Hello", b"Hello\r\n", b"and more\n"),
        ((b"Hel", b"lo\r"), b"Hello", b"Hello\r\n", b""),
        ((b"ab\x7fc\n",), b"ac", b"ab\b \bc\r\n", b""),
        ((b"\x7f\x7fa\n",), b"a", b"a\r\n", b""),
        (("Grü".encode(), b"\x7fo\n"), b"Gro", "Grü".encode() + b"\b \bo\r\n", b""),
        ((b"\xbc\x7fa\n",), b"a", b"\xbc\b \ba\r\n", b""),
        ((b"all of it\x15new\n",), b"new", b"all of it\r\nnew\r\n", b""),
        ((b"half\x04x",), b"half", b"half\r\n", b"x"),
        ((b"a\x1b[A\n",), b"a\x1b[A", b"a^[[A\r\n", b""),
        ((b"x" * 100_000 + b"end\n",), b"x" * 100_000 + b"end", b"x" * 100_000 + b"end\r\n", b""),
    ],
)
def test_a_line(parts: tuple[bytes, ...], text: bytes, shown: bytes, rest: bytes) -> None:
    line, found, left = typed(*parts)
    assert (line.is_whole, line.is_end) == (True, False)
    assert (bytes(line.text), found, left) == (text, shown, rest)


def test_the_end_of_input() -> None:
    line, shown, rest = typed(b"ab\x7f\x7f", b"\x04more")
    assert (line.is_whole, line.is_end, rest) == (True, True, b"more")
    assert shown == b"ab\b \b\b \b"


def test_a_line_that_is_not_whole_yet() -> None:
    line, _shown, rest = typed(b"half a")
    assert (line.is_whole, rest) == (False, b"")
