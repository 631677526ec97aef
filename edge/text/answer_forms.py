"""The format of a model's answers: its marks of thinking and its form of tool calls. Pure.

Both are recognised by the chat template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge.text.thinking import THINKING_MARKS, ThinkingMarks, thinking_marks
from edge.text.tool_call_forms import CALL_FORMS, CallForm, call_form


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The names of a form of tool calls and of a pair of thinking marks, in their tables."""

    calls: str = "bare"
    thoughts: str = "think"

    def __post_init__(self) -> None:
        if self.calls not in CALL_FORMS or self.thoughts not in THINKING_MARKS:
            raise ValueError(f"{self.calls} and {self.thoughts} are no form of answers")

    @property
    def call_form(self) -> CallForm:
        return CALL_FORMS[self.calls]

    @property
    def thinking_marks(self) -> ThinkingMarks:
        return THINKING_MARKS[self.thoughts]

    @property
    def tokens(self) -> frozenset[str]:
        """The special tokens that a parser must see, though tokenizers may leave them out of
        text."""
        return frozenset({*self.call_form.tokens, *self.thinking_marks.tokens})


def answer_form(
    template: str, has_token: Callable[[str], bool] = lambda _token: False
) -> AnswerForm:
    """The format for a chat template, whose source may be empty, and a vocabulary."""
    return AnswerForm(
        calls=call_form(template, has_token).name, thoughts=thinking_marks(template).name
    )
