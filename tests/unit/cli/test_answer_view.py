"""An answer on a terminal: whatever pieces it comes in, what stays is the whole, once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from edge.cli.chat.answer_view import AnswerView, Thoughts, cut_blocks
from edge.text.answer_parser import AnswerParser
from edge.text.answer_parts import Said
from edge.text.thinking import USUAL_MARKS, ThinkingSplitter

WIDTH, HEIGHT = 60, 12

MARKDOWN = """\
# A title

A paragraph of words that is longer than a line of the terminal, so it is wrapped, and goes on.

1. one
2. two

    of two, still

3. three

```python
def f():

    return "a line after an empty one"
```
After the code, at once.

~~~
``` is no end

~~~

| a | b |
|---|---|
| 1 | 2 |

The end.
"""


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def screen_after(
    parts: Sequence[str],
    *,
    markdown: bool = True,
    thoughts: Thoughts = "fold",
    begun: bool = False,
) -> list[str]:
    """All lines that the terminal has in the end, also those that scrolled away."""
    output = io.StringIO()
    console = Console(
        file=output, force_terminal=True, width=WIDTH, height=HEIGHT, color_system=None,
        legacy_windows=False, _environ={},
    )  # fmt: skip
    parser = AnswerParser(thinking=begun)
    with AnswerView(console, markdown=markdown, thoughts=thoughts) as view:
        for part in parts:
            view._next_s = 0.0  # each piece is drawn
            view.feed(parser.feed(part))
        view.feed(parser.finish())
    screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=10_000)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(output.getvalue())
    gone = ["".join(line[x].data for x in range(WIDTH)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*gone, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


@pytest.fixture(scope="module")
def whole() -> list[str]:
    return screen_after([MARKDOWN])


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=16))
def test_pieces_do_not_show(whole: list[str], cuts: list[int]) -> None:
    assert screen_after(pieces(MARKDOWN, cuts)) == whole


@pytest.mark.parametrize("size", [1, 7])
def test_nor_do_tokens(whole: list[str], size: int) -> None:
    tokens = [MARKDOWN[at : at + size] for at in range(0, len(MARKDOWN), size)]
    assert screen_after(tokens) == whole


def test_lines_of_a_paragraph_stay_lines() -> None:
    poem = "The sea is wide,\nthe sea is deep,\n\nand so am I."
    assert screen_after([poem]) == poem.splitlines()


@pytest.mark.parametrize(
    "text", ["vector<int> of it", "<answer>42</answer>", "[label]: http://example.org", "a <b> c"]
)
def test_what_looks_like_html_stays(text: str) -> None:
    assert screen_after([text]) == [text]


def test_a_block_longer_than_the_screen_is_there_whole_in_the_end() -> None:
    text = " ".join(f"word{number}" for number in range(150))
    words = [f"{word} " for word in text.split()]
    assert " ".join(screen_after(words)).split() == text.split()
    assert screen_after(words) == screen_after([text])
    plain = "".join(f"line {number}\n" for number in range(50))
    lines = screen_after(list(plain), markdown=False)
    assert lines == plain.splitlines()


def test_what_was_there_stays_where_it_ends_in_the_middle() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT)

    def interrupted() -> None:
        with AnswerView(console, markdown=True, thoughts="fold") as view:
            view.feed([Said("Half a sen")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    screen = pyte.Screen(WIDTH, HEIGHT)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(output.getvalue())
    assert "Half a sen" in screen.display[0]


def test_controls_are_shown_and_not_obeyed() -> None:
    lines = screen_after(["be\x1b[2Jfore \x07\x9b31m\x7f"], markdown=False)
    assert lines == [r"be\x1b[2Jfore \x07\x9b31m\x7f"]


@given(st.text("ab\n`~ #1.", max_size=80), st.lists(st.integers(0, 80), max_size=8))
def test_blocks_are_cut_at_the_same_places_however_they_come(text: str, cuts: list[int]) -> None:
    expected, rest = cut_blocks(text)
    assert "".join(expected) + rest == text
    found, held = [], ""
    for piece in pieces(text, cuts):
        blocks, held = cut_blocks(held + piece)
        found += blocks
    assert (found, held) == (expected, rest)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a\n\nb", "b"),
        ("a\n\n", "a\n\n"),
        ("1. a\n\n   more", "1. a\n\n   more"),
        ("```\na\n\nb", "```\na\n\nb"),
        ("```\na\n```\n\nb", "b"),
        ("~~~~\n```\n\na\n~~~\n\nb", "~~~~\n```\n\na\n~~~\n\nb"),
        ("a\n\n``", "a\n\n``"),
        ("a\n\nb\n\nc", "c"),
    ],
)
def test_where_a_block_ends(text: str, rest: str) -> None:
    assert cut_blocks(text)[1] == rest


OPEN, CLOSE = USUAL_MARKS.open, USUAL_MARKS.close
THOUGHT, SAID = "I should < say </ hello", "Hello </think> <think> there"


@given(st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_thoughts_are_told_apart(cuts: list[int], begun: bool) -> None:
    text = f"{'' if begun else f'  {OPEN}'}{THOUGHT}{CLOSE}\n\n{SAID}"
    splitter = ThinkingSplitter(begun)
    found = [splitter.feed(piece) for piece in pieces(text, cuts)]
    found.append(splitter.rest())
    assert "".join(thought for thought, _said in found) == THOUGHT
    assert "".join(said for _thought, said in found).lstrip("\n") == SAID


@given(st.text(max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_an_answer_without_thoughts_is_what_it_is(text: str, cuts: list[int]) -> None:
    splitter = ThinkingSplitter()
    found = [splitter.feed(piece) for piece in pieces(text, cuts)]
    found.append(splitter.rest())
    if not text.lstrip().startswith(OPEN):
        assert "".join(said for _thought, said in found) == text


def test_how_thoughts_are_shown() -> None:
    parts = ["<thi", "nk>", "One two ", "three.", "</think>", "\n\n", "The answer."]
    folded = screen_after(parts)
    assert folded == [
        "[thought for 3 words; /set thoughts show shows the next",
        "ones]",
        "The answer.",
    ]
    assert screen_after(parts, thoughts="show") == ["One two three.", "", "The answer."]
    assert screen_after(parts, thoughts="hide") == ["The answer."]
    assert screen_after(parts[2:], thoughts="show", begun=True) == screen_after(
        parts, thoughts="show"
    )
