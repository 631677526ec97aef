"""Streaming text of an answer: whole characters only, cut before a stop string.

Knows tokens and text, but neither requests nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import RequestError
from edge.text.cleanup import SpaceCleaner
from edge.text.tokenizer import Tokenizer


class TextStream:
    """The growing text of one answer.

    Joined together, the strings from `push` and `finish` are `tokenizer.decode` of all pushed
    tokens, cut before the stop string that begins first. Returned text is never taken back: an
    incomplete character, and text that may still become a stop string, are held back.

    prompt_ids: the tokens before the answer. They add no text, but affect its start: behind a
    prompt, SentencePiece vocabularies keep the space before the first word, and the answer
    completes a character that the prompt begins. Special tokens have no text, except the marks of
    the tokenizer's AnswerForm, which `tokenizer.decode` skips.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        """Raises RequestError for a stop string that is empty or not a text."""
        self._decoder = tokenizer.vocabulary.stream(prompt_ids)
        self._cleaner = SpaceCleaner(enabled=tokenizer.cleans_up_spaces)
        self._matcher = StopMatcher(stop)
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Later tokens have no effect."""
        return self._matcher.stopped_by is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.stopped_by

    def push(self, token_id: int) -> str:
        """The text that this token settles; often empty."""
        if self.stopped:
            return ""
        return self._show(self._matcher.push(self._cleaner.push(self._decoder.push(token_id))))

    def finish(self) -> str:
        """The text that was held back. Call it once, at the end."""
        if self.stopped:
            return ""
        rest = self._cleaner.push(self._decoder.finish()) + self._cleaner.finish()
        return self._show(self._matcher.push(rest) + self._matcher.finish())

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


class StopMatcher:
    """A filter that passes text up to the first stop string, and holds back a possible one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or not all(isinstance(word, str) and word for word in stop):
            raise RequestError(
                f"stop must be a list of strings that are not empty, not {stop!r}",
                remedy="leave out the empty one, or give no stop strings at all",
            )
        self._stop = tuple(stop)
        self._beginnings = frozenset(
            word[:length] for word in stop for length in range(1, len(word))
        )
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self.withheld = 0
        """Characters at the end of the text so far that were not returned."""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string any more, up to the stop string."""
        if self.stopped_by is not None or not text:
            return ""
        text = self._held + text
        end = len(text)
        if found := [(place, word) for word in self._stop if (place := text.find(word)) >= 0]:
            end, self.stopped_by = min(found)
        else:
            for length in range(min(len(text), self._longest), 0, -1):
                if text[-length:] in self._beginnings:
                    end = len(text) - length
                    break
        self._held = "" if self.stopped_by is not None else text[end:]
        self.withheld = len(text) - end
        return text[:end]

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held, self.withheld = self._held, "", 0
        return held
