"""What an answer consists of: what is thought, said, and called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Text for who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text between the marks of thinking."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model asks for the result of a tool. Nothing of it is checked against the tool's schema:
    it is text that a model wrote."""

    name: str
    arguments: Mapping[str, Any]


AnswerPart = Said | Thought | ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """A whole answer: what is said, what was thought before, and what is called."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
