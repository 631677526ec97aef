"""Special tokens in the texts of messages, kept from being tokens. Pure.

A chat template writes special tokens around messages. The same characters in a message are text, so
a message cannot end its turn and begin another. A mark goes through the template inside such
characters; the prompt is encoded in the pieces between marks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence

_ROLES: Mapping[str, Sequence[str]] = {
    "user": ("content",),
    "tool": ("content",),
    "assistant": ("content", "reasoning_content", "reasoning", "thinking"),
}
"""Texts that are quoted, by the role of their message. A model may repeat what a tool told it."""

_LONGEST_TOKEN = 128
_PRIVATE_USE, _PRIVATE_USE_CHARACTERS = 0xF0000, 0xFFFE
_MARK_CHARACTERS = 8
"""Characters of a mark. It is random, so no message contains it."""

Messages = Sequence[Mapping[str, object]]


class SpecialTexts:
    """Finds the spelling of special tokens in messages."""

    def __init__(self, tokens: Iterable[str], answer_marks: Collection[str]) -> None:
        """answer_marks: tokens that the model's own turns may have."""
        quoted = {each for each in tokens if 1 < len(each) <= _LONGEST_TOKEN}
        self._any = _any_of(quoted)
        self._outside_answers = _any_of(quoted.difference(answer_marks))

    def quoted(self, messages: Messages) -> tuple[Messages, str]:
        """The messages with a mark inside each special token of their texts, and the mark."""
        mark = "".join(
            chr(_PRIVATE_USE + secrets.randbelow(_PRIVATE_USE_CHARACTERS))
            for _ in range(_MARK_CHARACTERS)
        )
        return [self._quoted(each, mark) for each in messages], mark

    def _quoted(self, message: Mapping[str, object], mark: str) -> Mapping[str, object]:
        role = message.get("role")
        found = self._outside_answers if role == "assistant" else self._any
        if found is None or not isinstance(role, str):
            return message

        def marked(value: object) -> object:
            if isinstance(value, str):
                return found.sub(lambda each: f"{each[0][0]}{mark}{each[0][1:]}", value)
            if isinstance(value, list):  # parts of text, and pictures
                return [
                    {**part, "text": marked(part["text"])}
                    if isinstance(part, Mapping) and part.get("type") == "text" and "text" in part
                    else part
                    for part in value
                ]
            return value

        return {
            **message,
            **{name: marked(message[name]) for name in _ROLES.get(role, ()) if name in message},
        }


def pieces_of(prompt: str, mark: str) -> list[str]:
    """The pieces of a rendered prompt between marks."""
    escaped = json.dumps(mark)[1:-1]  # a template may write a text as JSON
    return prompt.replace(escaped, mark).split(mark)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of any of the texts, the longest first, that reads each character once."""
    root: dict[str, object] = {}
    for text in texts:
        place = root
        for character in text:
            place = place.setdefault(character, {})  # type: ignore[assignment]
        place[""] = {}
    return re.compile(_pattern(root)) if root else None


def _pattern(place: Mapping[str, object]) -> str:
    """The pattern of the rest of all texts from this place of their tree."""
    ways = []
    for character, rest in place.items():
        if character:
            assert isinstance(rest, Mapping), "made so"
            ways.append(re.escape(character) + _pattern(rest))
    if not ways:
        return ""
    whole = ways[0] if len(ways) == 1 and "" not in place else f"(?:{'|'.join(ways)})"
    return f"{whole}?" if "" in place else whole
