"""An answer in Markdown that arrives piece by piece, cut into whole blocks. Pure."""

from __future__ import annotations

import re
from itertools import pairwise

_FENCE = re.compile(r" {0,3}(```+|~~~+)")


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
