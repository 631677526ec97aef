"""The parts of a streamed answer, cut before a stop string. Pure.

Stop strings apply to text for the user, not to thinking, calls or marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.text.answer_parser import AnswerParser
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
        self._text = ""
        """Text that was not returned yet."""
        self._unsettled = 0
        """Characters at its end that the parser holds back."""

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
        for character in text:  # so that text for the user ends where settled text does
            if self._matcher.stopped_by is not None:
                break
            self._text += character
            parts = self._parser.feed(character)
            settled = self._unsettled + 1 - self._parser.held
            self._unsettled = self._parser.held
            shown.append(self._take(self._matcher, parts, settled, found))
        return "".join(shown), found

    def finish(self) -> tuple[str, list[AnswerPart]]:
        """The text and the parts that were held back. Call it once, at the end."""
        if self._matcher is None:
            return "", self._parser.finish()
        found: list[AnswerPart] = []
        shown = ""
        if self._matcher.stopped_by is None:
            settled, self._unsettled = self._unsettled, 0
            shown = self._take(self._matcher, self._parser.finish(), settled, found)
        if self._matcher.stopped_by is None:
            found += _said(self._matcher.finish())
            shown += self._text
        return shown, found

    def _take(
        self,
        matcher: StopMatcher,
        parts: Sequence[AnswerPart],
        settled: int,
        found: list[AnswerPart],
    ) -> str:
        """The text that may be shown. Adds its parts to `found`.

        settled: characters that the parser has just settled; text for the user is at their end.
        """
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
        end = len(self._text) - self._unsettled - matcher.withheld
        shown, self._text = self._text[: max(0, end)], self._text[max(0, end) :]
        return shown


def _said(text: str) -> list[AnswerPart]:
    return [Said(text)] if text else []
