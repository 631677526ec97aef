"""Answers that come in pieces, and what a reader makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from edge.text.answer_forms import AnswerForm
from edge.text.answer_parser import AnswerParser
from edge.text.answer_parts import AnswerPart, Said, Thought
from edge.text.tool_types import ToolTypes


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """At these places, counted round and round."""
    places = sorted({0, len(text), *(each % (len(text) + 1) for each in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def parts_of(
    pieces: Sequence[str],
    form: AnswerForm | None = None,
    *,
    thinking: bool = False,
    tools: ToolTypes | None = None,
) -> list[AnswerPart]:
    """With neighbouring text as one part, as a reader joins it."""
    parser = AnswerParser(form, thinking=thinking, tools=tools)
    found: list[AnswerPart] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        last = found[-1] if found else None
        if isinstance(part, Said) and isinstance(last, Said):
            found[-1] = Said(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found
