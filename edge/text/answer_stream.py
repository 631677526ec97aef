"""The parts of a streamed answer, cut before a stop string. Pure.

Stop strings apply to text for the user, not to thinking, calls or marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge.text.answer_parser import AnswerParser, joined
from edge.text.answer_parts import AnswerPart, Said
from edge.text.stream import StopMatcher


class AnswerStream:
    """Takes the text of an answer in pieces, returns its settled text and parts.

    The settled texts together are the whole text, up to the stop string that begins first in text
    for the user. They are never taken back, so a possible stop string is held back.
    """

    def __init__(self, parser: AnswerParser, stop: Sequence[str] = ()) -> None:
        """Raises RequestError for a stop string that is empty or not a text."""
        self._parser = parser
        self._matcher = StopMatcher(stop) if stop else None
        self._text: list[str] = []
        """Text that was not returned yet, in pieces."""
        self._characters = 0
        """Its length."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return None if self._matcher is None else self._matcher.stopped_by

    def push(self, text: str) -> tuple[str, list[AnswerPart]]:
        """The text and the parts that this piece settles."""
        if self._matcher is None:
            return text, self._parser.feed(text)
        shown: list[str] = []
        found: list[AnswerPart] = []
        for piece in self._pieces(text):
            if self._matcher.stopped_by is not None:
                break
            held = self._parser.held
            self._text.append(piece)
            self._characters += len(piece)
            parts = self._parser.feed(piece)
            settled = held + len(piece) - self._parser.held
            shown.append(self._take(self._matcher, parts, settled, found))
        return "".join(shown), joined(found)

    def finish(self) -> tuple[str, list[AnswerPart]]:
        """The text and the parts that were held back. Call it once, at the end."""
        if self._matcher is None:
            return "", self._parser.finish()
        found: list[AnswerPart] = []
        shown = ""
        if self._matcher.stopped_by is None:
            held = self._parser.held
            shown = self._take(self._matcher, self._parser.finish(), held, found, is_over=True)
        if self._matcher.stopped_by is None:
            found += _said(self._matcher.finish())
            shown += "".join(self._text)
        return shown, joined(found)

    def _pieces(self, text: str) -> Iterable[str]:
        """The text in pieces, each of which belongs to one part: so what is said in a piece ends
        where its settled text does."""
        if self._parser.held or not self._parser.mark_starts.isdisjoint(text):
            return text
        return (text,) if text else ()

    def _take(
        self,
        matcher: StopMatcher,
        parts: Sequence[AnswerPart],
        settled: int,
        found: list[AnswerPart],
        *,
        is_over: bool = False,
    ) -> str:
        """The text that may be shown. Adds its parts to `found`.

        settled: characters that the parser has just settled; text for the user is at their end.
        """
        parts = joined(parts)
        said = sum(len(part.text) for part in parts if isinstance(part, Said))
        if settled > said:  # no stop string extends over a mark or a thought
            found += _said(matcher.finish())
        for part in parts:
            if not isinstance(part, Said):
                found += [*_said(matcher.finish()), part]
                continue
            found += _said(matcher.push(part.text))
            if matcher.stopped_by is not None:
                break
        held = 0 if is_over else self._parser.held
        end = self._characters - held - matcher.withheld
        if end <= 0:
            return ""
        text = "".join(self._text)
        self._text, self._characters = [text[end:]], len(text) - end
        return text[:end]


def _said(text: str) -> list[AnswerPart]:
    return [Said(text)] if text else []
