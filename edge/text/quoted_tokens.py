"""Special tokens in the texts of users and tools, kept from being tokens. Pure.

A chat template writes special tokens around messages. The same characters in a message are text, so
a message cannot end its turn and begin another. A mark goes through the template inside such
characters; the prompt is encoded in the pieces between marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

_QUOTED = ("user", "tool")
"""Roles whose messages come from outside. The model's own turns may have special tokens."""

_PRIVATE_USE, _PRIVATE_USE_CHARACTERS = 0xF0000, 0xFFFE
_MARK_CHARACTERS = 8
"""Characters of a mark. It is random, so no message contains it."""


class SpecialTexts:
    """Finds the spelling of special tokens in messages."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted((each for each in tokens if len(each) > 1), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def quoted(
        self, messages: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[Mapping[str, object]], str]:
        """The messages with a mark inside each special token that a user or tool wrote, and the
        mark; an empty mark: there is none."""
        if self._any is None or not any(map(self._has_one, messages)):
            return messages, ""
        mark = "".join(
            chr(_PRIVATE_USE + secrets.randbelow(_PRIVATE_USE_CHARACTERS))
            for _ in range(_MARK_CHARACTERS)
        )
        found = [self._marked(each, mark) if self._has_one(each) else each for each in messages]
        return found, mark

    def _has_one(self, message: Mapping[str, object]) -> bool:
        content = message.get("content")
        return (
            message.get("role") in _QUOTED
            and isinstance(content, str)
            and self._any is not None
            and self._any.search(content) is not None
        )

    def _marked(self, message: Mapping[str, object], mark: str) -> Mapping[str, object]:
        assert self._any is not None, "a token was found"
        text = str(message["content"])
        marked = self._any.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", text)
        return {**message, "content": marked}
