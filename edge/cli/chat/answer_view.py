"""The view of a streamed answer on a terminal: Markdown by blocks, thinking dimmed."""

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

from edge.cli.hangup import HungUp
from edge.errors import without_controls
from edge.system.terminal import has_hung_up
from edge.text.answer_parts import AnswerPart, Said, Thought

Thoughts = Literal["fold", "show", "hide"]
_REDRAW_S = 0.08
_THOUGHT_LINES = 3
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


class AnswerView:
    """Renders an answer as it is fed. A context manager; left early, the answer so far stays.

    Finished blocks are printed once and scroll away; only the last block is redrawn.
    """

    def __init__(self, console: Console, *, markdown: bool, thoughts: Thoughts) -> None:
        self._console = console
        self._markdown = markdown
        self._thoughts = thoughts
        self._thought = self._said = ""
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._next_s = 0.0

    def feed(self, parts: Sequence[AnswerPart]) -> None:
        """Add the parts of a token, and draw them if the last drawing was long enough ago."""
        self._take(parts)
        began_s = time.monotonic()
        if began_s < self._next_s:
            return
        if has_hung_up():  # rich would silently draw nothing more
            raise HungUp
        self._settle()
        self._live.update(self._last_block(), refresh=True)
        # A long block is slow to draw: at most a tenth of the time is spent on it.
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
        self._settle()
        self._live.update(Text(""), refresh=True)
        self._live.__exit__(kind, error, trace)
        self._tell_thought()
        if self._said.strip():
            self._console.print(self._rendered(self._said.rstrip()))

    def _take(self, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, Thought):
                self._thought += without_controls(part.text)
            elif isinstance(part, Said):
                self._said += without_controls(part.text)
            else:  # a call of a tool that was not offered
                self._said += f"{part.name}({json.dumps(part.arguments, ensure_ascii=False)})"

    def _settle(self) -> None:
        """Print finished blocks once and for all."""
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
        """The end of the last block, as much as fits the screen."""
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
    """Markdown in which HTML and link definitions stay visible as text. Line breaks in a paragraph
    stay, as a poem or an address needs them."""

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
    """(Finished blocks of Markdown, the rest).

    A block ends at an empty line before a line that is not indented, outside of fenced code.
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
