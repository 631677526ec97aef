"""A streaming parser of answers in channels (Harmony), the format of gpt-oss. Pure.

    <|channel|>analysis<|message|>…<|end|>                                     thinking
    <|start|>assistant<|channel|>final<|message|>…                             text
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}

The last one is a tool call. The prompt ends in `<|start|>assistant`, and an answer begins behind
that. The receiver may stand before the channel, too. A call whose arguments are not a JSON object,
or of a tool that was not offered, is text, to the letter. Each character is read a bounded number
of times.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Literal

from edge.text.answer_parts import AnswerPart, Said, Thought
from edge.text.thinking import before_partial
from edge.text.tool_call_bodies import json_calls

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END = "<|message|>", "<|end|>"

_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, "<|call|>", "<|return|>")
_ANY = re.compile("|".join(map(re.escape, _MARKS)))

_MOST_HEADER = 512
"""Most characters of a header; a longer one is text."""

_FIRST = re.compile(r"\s{0,8}(?:to=\S{0,200}\s{0,8}|to?)?")
"""The state before the first mark of an answer."""
_NAME = re.compile(re.escape(CHANNEL) + r"\s{0,8}([a-z]+)")
_RECEIVER = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_NOBODY = ("all", "assistant", "user")
"""Receivers that are not tools."""

_BETWEEN = "\n\n"
"""The separator of two messages of one kind."""


class ChannelReader:
    """Takes pieces of an answer's text, returns its parts; call `finish` once at the end.

    tools: the names of the offered tools. thinking: the prompt ends within thinking.
    """

    mark_starts = frozenset("<")

    def __init__(self, tools: Container[str], *, thinking: bool = False) -> None:
        self._tools = tools
        self._state: Literal["first", "header", "message", "outside"] = "first"
        self._kind: type[Said | Thought] | None = Said
        """The kind of the message; None: a call."""
        self._header = ""
        self._call: list[str] = []
        self._call_characters = 0
        self._tail = ""
        """Text that may become a mark."""
        self._told: set[type[Said | Thought]] = set()
        self._is_another = False
        """Whether the message follows one of its kind."""
        if thinking:
            self._state, self._kind = "message", Thought

    @property
    def held(self) -> int:
        """Characters at the end of the input that are not settled."""
        if self._state == "message" and self._kind is None:
            return len(self._header) + self._call_characters + len(self._tail)
        is_header = self._state in ("first", "header")
        return len(self._tail) + (len(self._header) if is_header else 0)

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are settled by this piece."""
        return [*self._read(text)]

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back: a call if its arguments are complete, else text. A header
        without a message is dropped."""
        tail, self._tail = self._tail, ""
        parts = [*self._text(tail)]
        if self._state == "first":
            parts += self._say(self._header)
        return parts + self._over()

    def _read(self, text: str) -> Iterator[AnswerPart]:
        text, place = self._tail + text, 0
        for found in _ANY.finditer(text):
            yield from self._text(text[place : found.start()])
            yield from self._mark(found[0])
            place = found.end()
        rest = text[place:]
        kept = min(before_partial(rest, mark) for mark in _MARKS)
        self._tail = rest[kept:]
        yield from self._text(rest[:kept])

    def _text(self, text: str) -> list[AnswerPart]:
        if self._state == "message" and self._kind is None:
            self._call.append(text)
            self._call_characters += len(text)
            return []
        if self._state == "message" and self._kind is Thought:
            return self._tell(Thought, text)
        if self._state in ("message", "outside"):
            return self._say(text)
        self._header += text
        is_header = len(self._header) <= _MOST_HEADER
        if self._state == "first":
            is_header = _FIRST.fullmatch(self._header) is not None
        return [] if is_header else self._no_header()

    def _mark(self, mark: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        state = self._state
        if state == "message":
            if mark in (CONSTRAIN, MESSAGE):
                return self._text(mark)
            parts = self._over()
        elif state != "outside":
            if mark in (CHANNEL, CONSTRAIN, MESSAGE):
                return self._of_header(mark)
            if self._header.strip():
                parts = self._no_header()
        if mark in (START, CHANNEL):
            self._state, self._header = "header", mark
            return parts
        self._state = "outside"
        return parts if state == "message" else [*parts, *self._say(mark)]

    def _of_header(self, mark: str) -> list[AnswerPart]:
        self._state = "header"
        self._header += mark
        if len(self._header) > _MOST_HEADER:
            return self._no_header()
        if mark == MESSAGE:
            self._begin()
        return []

    def _begin(self) -> None:
        """Begin a message of the kind in its header."""
        name, receiver = _NAME.search(self._header), _RECEIVER.search(self._header)
        self._state, self._call, self._call_characters = "message", [], 0
        if receiver is not None and receiver[1] not in _NOBODY:
            self._kind = None
        else:
            self._kind = Thought if name is not None and name[1] == "analysis" else Said
        self._is_another = self._kind in self._told

    def _over(self) -> list[AnswerPart]:
        """End the message."""
        if self._state != "message" or self._kind is not None:
            return []
        receiver = _RECEIVER.search(self._header)
        name = receiver[1].removeprefix("functions.") if receiver is not None else ""
        text = "".join(self._call)
        self._call, self._kind = [], Said
        calls = json_calls(text if text.strip() else "{}", name) if name in self._tools else None
        return [*calls] if calls is not None else self._say(self._header + text)

    def _no_header(self) -> list[AnswerPart]:
        header, self._header, self._state = self._header, "", "outside"
        return self._say(header)

    def _say(self, text: str) -> list[AnswerPart]:
        return self._tell(Said, text)

    def _tell(self, kind: type[Said | Thought], text: str) -> list[AnswerPart]:
        if not text:
            return []
        between = _BETWEEN if self._is_another else ""
        self._is_another = False
        self._told.add(kind)
        return [kind(between + text)]
