"""An answer that arrives piece by piece, cut into what is thought and whole blocks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

OPEN, CLOSE = "<think>", "</think>"
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


@dataclass(slots=True)
class ThinkingSplitter:
    """Tells what a model thinks from what it says: between two marks at the answer's beginning.

    thinking: some chat templates write the first mark, so the answer begins after it.
    """

    thinking: bool = False
    _held: str = ""
    _begun: bool = False

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, said) of what has come and may be shown."""
        self._held += text
        if not self._begun and not self.thinking:
            start = self._held.lstrip()
            if OPEN.startswith(start[: len(OPEN)]) and len(start) < len(OPEN):
                return "", ""  # it may become the mark
            self._begun = True
            if start.startswith(OPEN):
                self.thinking = True
                self._held = start.removeprefix(OPEN)
        if not self.thinking:
            return "", self._take(len(self._held))
        end = self._held.find(CLOSE)
        if end < 0:
            return self._take(_before_partial(self._held, CLOSE)), ""
        thought = self._take(end)
        self._begun, self.thinking = True, False
        self._held = self._held.removeprefix(CLOSE).lstrip("\n")
        return thought, self._take(len(self._held))

    def rest(self) -> tuple[str, str]:
        """What was held back when the answer ended."""
        held = self._take(len(self._held))
        return (held, "") if self.thinking else ("", held)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def _before_partial(text: str, mark: str) -> int:
    """How much of the text comes before what may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return len(text) - length
    return len(text)


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
