"""The parts of an answer: thinking, text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text between the marks of thinking."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call, as the model wrote it; not checked against the tool's schema."""

    name: str
    arguments: Mapping[str, Any]


AnswerPart = Said | Thought | ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """A whole answer: text, thinking and tool calls."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
