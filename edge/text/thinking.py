"""A streaming splitter of answers into thinking and text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SWITCHES = ("enable_thinking", "thinking")
"""The template variables that switch thinking: of Qwen, GLM and SmolLM, and of Granite and
DeepSeek."""

_MOST_SPACE = 64
"""Most white space before the first mark, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """The marks around a model's thinking."""

    name: str
    open: str
    close: str
    known_by: str
    """A text by which a chat template is recognised."""

    @property
    def tokens(self) -> tuple[str, str]:
        return self.known_by, self.close


_ALL = (
    ThinkingMarks(
        name="analysis",
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        known_by="<|channel|>",
    ),
    ThinkingMarks(
        name="channel", open="<|channel>thought\n", close="<channel|>", known_by="<|channel>"
    ),
    *(
        ThinkingMarks(name=name, open=open, close=close, known_by=open)
        for name, open, close in (
            ("THINK", "[THINK]", "[/THINK]"),
            ("seed", "<seed:think>", "</seed:think>"),
            ("START", "<|START_THINKING|>", "<|END_THINKING|>"),
            ("triangles", "◁think▷", "◁/think▷"),
            ("think", "<think>", "</think>"),
        )
    ),
)

THINKING_MARKS: Mapping[str, ThinkingMarks] = {each.name: each for each in _ALL}
"""The marks by name; the first ones found in a template are its marks, else the last ones."""

USUAL_MARKS = THINKING_MARKS["think"]


def thinking_marks(template: str) -> ThinkingMarks:
    """The marks of a chat template, whose source may be empty."""
    return next((each for each in _ALL if each.known_by in template), USUAL_MARKS)


@dataclass(slots=True)
class ThinkingSplitter:
    """Splits off thinking between two marks at the start of an answer.

    thinking: the prompt ends in the first mark, so the answer begins behind it.
    """

    thinking: bool = False
    marks: ThinkingMarks = field(default=USUAL_MARKS, kw_only=True)
    _held: str = ""
    _begun: bool = False
    _after_thought: bool = False

    @property
    def held(self) -> int:
        """Characters at the end of the input that are not settled."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str]:
        """The settled (thinking, text) of this piece."""
        self._held += text
        if not self._begun and not self.thinking:
            start, mark = self._held.lstrip(), self.marks.open
            num_spaces = len(self._held) - len(start)
            if num_spaces <= _MOST_SPACE and len(start) < len(mark) and mark.startswith(start):
                return "", ""  # it may become the mark
            self._begun = True
            if num_spaces <= _MOST_SPACE and start.startswith(mark):
                self.thinking = True
                self._held = start.removeprefix(mark)
        if not self.thinking:
            return "", self._said()
        end = self._held.find(self.marks.close)
        if end < 0:
            return self._take(before_partial(self._held, self.marks.close)), ""
        thought = self._take(end)
        self._begun, self.thinking, self._after_thought = True, False, True
        self._held = self._held.removeprefix(self.marks.close)
        return thought, self._said()

    def rest(self) -> tuple[str, str]:
        """The (thinking, text) that was held back, at the end of the answer."""
        held = self._take(len(self._held))
        return (held, "") if self.thinking else ("", held)

    def _said(self) -> str:
        """The text without empty lines after thinking."""
        if self._after_thought:
            self._held = self._held.lstrip("\n")
            self._after_thought = not self._held
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def before_partial(text: str, mark: str) -> int:
    """The length of the text before a possible beginning of the mark at its end."""
    start = max(0, len(text) - len(mark) + 1)
    while (start := text.find(mark[:1], start)) >= 0:
        if mark.startswith(text[start:]):
            return start
        start += 1
    return len(text)
