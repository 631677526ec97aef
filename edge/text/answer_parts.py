"""An answer that arrives piece by piece, told apart: what is thought, said, and called. Pure.

However the text is cut into pieces, the parts are the same. These forms of calls are known:

    <tool_call>{"name": …, "arguments": …}</tool_call>      Hermes, Qwen and others; also an array
    [TOOL_CALLS][{"name": …, "arguments": …}, …]            Mistral
    [TOOL_CALLS]name[ARGS]{…}                               Mistral since 2025
    {"name": …, "parameters": …}; …                         Llama 3: all of the answer

The last form, and Mistral's without its mark, which tokenizers leave out of text, are calls only
where they name a tool that the model was told of. What is no call stays text, to the letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge.text.thinking import ThinkingSplitter, before_partial

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_MARKS = (_CALL_OPEN, _MISTRAL, "<|python_tag|>")
_NAMED = re.compile(
    r"\s{0,8}([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
_LONGEST_NAME = 256
"""More than that matches."""
_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_BETWEEN = " \t\r\n;,"


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


class AnswerParser:
    """Pieces of an answer's text in, its parts out; `finish` once at its end.

    thinking: the prompt has the model think already. tools: names that the model was told of.
    """

    def __init__(self, *, thinking: bool = False, tools: Collection[str] = ()) -> None:
        self._thinking = ThinkingSplitter(thinking)
        self._calls = _CallFinder(frozenset(tools))

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are settled now; text comes in as many pieces as it likes."""
        thought, said = self._thinking.feed(text)
        return [*_thoughts(thought), *self._calls.feed(said)]

    def finish(self) -> list[AnswerPart]:
        """What was held back: a call without its end is one if its JSON is whole, else text."""
        thought, said = self._thinking.rest()
        return [*_thoughts(thought), *self._calls.feed(said), *self._calls.finish()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """A whole answer: what is said, what was thought before, and what is called."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def read_answer(text: str, *, thinking: bool = False, tools: Collection[str] = ()) -> ReadAnswer:
    """See AnswerParser. Content that is nothing but white space around calls is empty."""
    parser = AnswerParser(thinking=thinking, tools=tools)
    parts = [*parser.feed(text), *parser.finish()]
    calls = tuple(part for part in parts if isinstance(part, ToolCall))
    content = "".join(part.text for part in parts if isinstance(part, Said))
    return ReadAnswer(
        content=content.strip() if calls else content,
        reasoning="".join(part.text for part in parts if isinstance(part, Thought)).strip(),
        tool_calls=calls,
    )


def _thoughts(text: str) -> list[AnswerPart]:
    return [Thought(text)] if text else []


class _CallFinder:
    """Finds calls in what is said. It is at a bare value, which may be a call, in text, or after a
    mark; `_held` begins there."""

    def __init__(self, tools: frozenset[str]) -> None:
        self._tools = tools
        self._held = ""
        self._mark = ""
        """The mark that `_held` begins after."""
        self._is_bare = bool(tools)
        """Only calls, or nothing, have come so far."""
        self._is_after_call = False
        """White space that comes now separates calls."""
        self._json = _JsonEnd()

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        return _joined(self._settled(is_over=False))

    def finish(self) -> list[AnswerPart]:
        return _joined(self._settled(is_over=True))

    def _settled(self, *, is_over: bool) -> Iterator[AnswerPart]:
        while self._held or self._mark:
            if self._mark:
                found = self._after_mark(is_over)
            elif self._is_bare:
                found = self._bare(is_over)
            else:
                found = self._in_text(is_over)
            if found is None:
                return
            yield from found

    def _in_text(self, is_over: bool) -> list[AnswerPart] | None:
        """Text up to a mark, or what cannot become one; None where all must wait."""
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        places = [(place, mark) for mark in _MARKS if (place := self._held.find(mark)) >= 0]
        if places:
            place, self._mark = min(places)
            said = self._take(place)
            self._take(len(self._mark))
            return [Said(said)]
        count = len(self._held)
        if not is_over:
            count = min(before_partial(self._held, mark) for mark in _MARKS)
        return [Said(self._take(count))] if count else None

    def _bare(self, is_over: bool) -> list[AnswerPart] | None:
        """Calls without a mark, or nothing where it is something else; None where that is not told
        yet."""
        start = self._held.lstrip(_BETWEEN)
        if not is_over and start and any(mark.startswith(start) for mark in _MARKS):
            return None
        is_call = not start.startswith(_MARKS) and _may_be_call(start)
        end = self._json.find(start) if is_call else None
        if is_call and end is None and not is_over:
            return None
        calls = None if end is None else _calls(start[:end])
        self._json = _JsonEnd()
        if calls is None or any(call.name not in self._tools for call in calls):
            self._is_bare = False
            return []
        self._held, self._is_after_call = start[end:], True
        return [*calls]

    def _after_mark(self, is_over: bool) -> list[AnswerPart] | None:
        start = self._held.lstrip()
        named = _NAMED.match(self._held) if self._mark == _MISTRAL else None
        if named is not None:
            start = self._held[named.end() :]
        elif start and start[0] not in "{[":
            may_be_named = self._mark == _MISTRAL and len(self._held) < _LONGEST_NAME
            return None if may_be_named and not is_over else self._no_call()
        end = self._json.find(start) if start else None
        if end is None:
            return self._no_call() if is_over else None
        calls = _calls(start[:end], named[1] if named is not None else None)
        if calls is None:
            return self._no_call()
        rest = start[end:]
        if self._mark == _CALL_OPEN:
            after = rest.lstrip()
            if not is_over and len(after) < len(_CALL_CLOSE) and _CALL_CLOSE.startswith(after):
                return None
            rest = after.removeprefix(_CALL_CLOSE) if after.startswith(_CALL_CLOSE) else rest
        self._held, self._mark, self._json = rest, "", _JsonEnd()
        self._is_after_call = True
        return [*calls]

    def _no_call(self) -> list[AnswerPart]:
        """The mark is text, and so is what comes after it, up to another mark."""
        said, self._mark, self._json = self._mark, "", _JsonEnd()
        return [Said(said)]

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class _JsonEnd:
    """Finds where the JSON object or array that a growing text begins with ends; looks at each
    character once."""

    def __init__(self) -> None:
        self._place = self._depth = 0
        self._in_text = self._is_escaped = False

    def find(self, text: str) -> int | None:
        if self._place and self._depth <= 0:
            return self._place
        while self._place < len(text):
            letter = text[self._place]
            self._place += 1
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._in_text = False
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._place
        return None


def _calls(text: str, name: str | None = None) -> list[ToolCall] | None:
    """The calls that a JSON text is; with a name it is its arguments. None where it is no call."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if name is not None:
        return [ToolCall(name=name, arguments=value)] if isinstance(value, dict) else None
    found: list[ToolCall] = []
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) else None
        if isinstance(call, str) and "name" not in each:  # {"function": name, "parameters": …}
            call = {**each, "name": call}
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # JSON in JSON
            try:
                arguments = json.loads(arguments or "{}", strict=False, parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return None
        found.append(ToolCall(name=call["name"], arguments=arguments))
    return found or None


def _may_be_call(start: str) -> bool:
    """Whether such a beginning of an answer may become the JSON of calls."""
    rest = start.lstrip("[ \t\r\n")
    if not rest.startswith("{"):
        return not rest
    rest = rest[1:].lstrip()
    if not rest.startswith('"'):
        return not rest
    key, quote, _rest = rest[1:].partition('"')
    return key in _KEYS if quote else any(each.startswith(key) for each in _KEYS)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _joined(parts: Iterator[AnswerPart]) -> list[AnswerPart]:
    """Neighbouring text as one part, and none that is empty."""
    found: list[AnswerPart] = []
    for part in parts:
        if isinstance(part, Said) and found and isinstance(found[-1], Said):
            found[-1] = Said(found[-1].text + part.text)
        elif not isinstance(part, Said) or part.text:
            found.append(part)
    return found
