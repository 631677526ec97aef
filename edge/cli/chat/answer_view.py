"""How an answer looks on a terminal while it comes: Markdown, block by block, thoughts dimmed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Literal

from markdown_it import MarkdownIt
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from edge.cli.hangup import HungUp, has_hung_up
from edge.errors import without_controls
from edge.text.answer_parser import AnswerParser
from edge.text.answer_parts import AnswerPart, Said, Thought

Thoughts = Literal["fold", "show", "hide"]
_REDRAW_S = 0.08
_THOUGHT_LINES = 3
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


class AnswerView:
    """A context manager; `feed` what comes. Left early, what has come stays on the screen.

    Whole blocks are printed for good, where they scroll away; only the last one is redrawn.
    """

    def __init__(
        self, console: Console, *, markdown: bool, thoughts: Thoughts, parser: AnswerParser
    ) -> None:
        """parser: of the answer that begins now."""
        self._console = console
        self._markdown = markdown
        self._thoughts = thoughts
        self._parser = parser
        self._thought = self._said = ""
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._next_s = 0.0

    def feed(self, text: str) -> None:
        self._take(self._parser.feed(without_controls(text)))
        began_s = time.monotonic()
        if began_s < self._next_s:
            return
        if has_hung_up():  # rich would draw nothing more, and say nothing
            raise HungUp
        self._settle()
        self._live.update(self._last_block(), refresh=True)
        # A long block takes long to draw: it may take a tenth of the time.
        now_s = time.monotonic()
        self._next_s = now_s + max(_REDRAW_S, 9 * (now_s - began_s))

    def __enter__(self) -> AnswerView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take(self._parser.finish())
        self._settle()
        self._live.update(Text(""), refresh=True)
        self._live.__exit__(kind, error, trace)
        self._tell_thought()
        if self._said.strip():
            self._console.print(self._rendered(self._said.rstrip()))

    def _take(self, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, Thought):
                self._thought += part.text
            elif isinstance(part, Said):
                self._said += part.text
            else:  # of a tool that nobody offered
                self._said += f"{part.name}({json.dumps(part.arguments, ensure_ascii=False)})"

    def _settle(self) -> None:
        """Print for good what nothing to come can change."""
        if not self._said:
            return
        self._tell_thought()
        blocks, self._said = cut_blocks(self._said) if self._markdown else _lines(self._said)
        for block in blocks:
            if block.strip():
                self._console.print(self._rendered(block.rstrip("\n")))
                if self._markdown:
                    self._console.print()

    def _tell_thought(self) -> None:
        thought, self._thought = self._thought.strip(), ""
        if not thought or self._thoughts == "hide":
            return
        if self._thoughts == "show":
            self._console.print(Text(thought, style="dim italic"), Text(""), sep="\n")
        else:
            words = len(thought.split())
            line = f"[thought for {words} words; /set thoughts show shows the next ones]"
            self._console.print(Text(line, style="dim italic"))

    def _last_block(self) -> RenderableType:
        """As much of its end as the screen has room for."""
        parts: list[RenderableType] = []
        if self._thought.strip() and self._thoughts != "hide":
            lines = _THOUGHT_LINES if self._thoughts == "fold" else self._console.height - 2
            parts.append(self._end_of(Text(self._thought.strip(), style="dim italic"), lines))
        if self._said.strip():
            parts.append(self._end_of(self._rendered(self._said), self._console.height - 2))
        return Group(*parts)

    def _end_of(self, part: RenderableType, lines: int) -> RenderableType:
        rendered = self._console.render_lines(part, pad=False)
        if len(rendered) <= lines:
            return part
        return Text("\n").join(
            Text.assemble(*((each.text, each.style or "") for each in line))
            for line in rendered[-lines:]
        )

    def _rendered(self, text: str) -> RenderableType:
        return _Markdown(text) if self._markdown else Text(text)


class _Markdown(Markdown):
    """Without HTML and definitions of links, neither of which would be seen: they stay text. Lines
    of a paragraph stay lines, as those of a poem or an address."""

    def __init__(self, markup: str) -> None:
        super().__init__("")
        parser = MarkdownIt("commonmark", {"html": False})
        parser.enable(["strikethrough", "table"]).disable(["reference"])
        self.markup, self.parsed = markup, parser.parse(markup)
        for block in self.parsed:
            for each in block.children or ():
                if each.type == "softbreak":
                    each.type = "hardbreak"


def _lines(text: str) -> tuple[list[str], str]:
    cut = text.rfind("\n") + 1
    return [text[:cut]], text[cut:]


def cut_blocks(text: str) -> tuple[list[str], str]:
    """(Blocks of Markdown that nothing to come can change, the rest).

    A block ends at an empty line, outside of a fence of code, before a line that is not indented.
    """
    fence = ""
    place = 0
    cuts = [0]
    after_blank = False
    while (end := text.find("\n", place)) >= 0:
        line = text[place:end]
        if found := _FENCE.match(line):
            mark = found.group(1)
            if not fence:
                if after_blank:
                    cuts.append(place)
                fence = mark
            elif line.strip().startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif not fence and after_blank and line.strip() and not line[0].isspace():
            cuts.append(place)
        after_blank = not fence and not line.strip()
        place = end + 1
    last = text[place:]
    if not fence and after_blank and last and not last[0].isspace() and not _may_be_fence(last):
        cuts.append(place)
    return [text[a:b] for a, b in pairwise(cuts)], text[cuts[-1] :]


def _may_be_fence(line: str) -> bool:
    return line[0] in "`~" and len(line.rstrip("`~")) == 0
