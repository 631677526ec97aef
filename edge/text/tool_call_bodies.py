"""Streaming readers of a tool call's body, behind its mark. Pure.

Each character is read a bounded number of times for any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edge.text.answer_parts import ToolCall
from edge.text.tool_types import parsed

LONGEST_HEAD = 256
"""Most characters between a mark and the text that shows a call's form: white space and a name."""

_STRUCTURE = re.compile(r"[ \t\r\n0-9+\-.eE:,truefalsn]*")
"""The characters of JSON outside of texts and brackets."""
_IN_TEXT = re.compile(r'[^"\\]*')

_LONGEST_CLOSE = 64
"""Longer than the match of any closing pattern."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A call is over, or will never be one."""

    calls: list[ToolCall] | None
    """The calls; None: it is no call."""
    after: str
    """The text behind the call."""


class Body(Protocol):
    """Takes pieces of text, until it returns Ended or `finish` is called."""

    def feed(self, text: str) -> Ended | None:
        """Read a piece. None: the body continues."""

    def finish(self) -> Ended:
        """The result at the end of the answer."""


Parse = Callable[[str], list[ToolCall] | None]
"""Parses a whole text as calls; None: it is none."""


class JsonBody:
    """A JSON object or array."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._end = JsonEnd()
        self._pieces: list[str] = []

    def feed(self, text: str) -> Ended | None:
        end = self._end.feed(text)
        if end is not None:
            self._pieces.append(text[:end])
            return Ended(self._parse("".join(self._pieces)), text[end:])
        if self._end.has_failed:
            return Ended(None, text[self._end.place :])
        self._pieces.append(text)
        return None

    def finish(self) -> Ended:
        return Ended(None, "")


class MarkedBody:
    """A body with a closing mark, which may be missing."""

    def __init__(self, body: Body, close: str) -> None:
        self._body = body
        self._close = close
        self._calls: list[ToolCall] | None = None
        self._behind = ""
        """Text behind the body that may become the mark."""

    def feed(self, text: str) -> Ended | None:
        if self._calls is None:
            ended = self._body.feed(text)
            if ended is None or ended.calls is None:
                return ended
            self._calls, text = ended.calls, ended.after
        self._behind += text if self._behind else text.lstrip()
        if self._behind.startswith(self._close):
            return Ended(self._calls, self._behind.removeprefix(self._close))
        return None if self._close.startswith(self._behind) else Ended(self._calls, self._behind)

    def finish(self) -> Ended:
        return self._body.finish() if self._calls is None else Ended(self._calls, self._behind)


class ClosedBody:
    """All text up to a closing pattern."""

    def __init__(self, close: re.Pattern[str], parse: Parse, *, may_be_open: bool = False) -> None:
        """close: the pattern of the end, which matches at most 64 characters; its group `own` is
        part of the body. may_be_open: the answer's end closes the body, too."""
        self._close = close
        self._parse = parse
        self._may_be_open = may_be_open
        self._pieces: list[str] = []
        self._tail = ""
        """The end of the text so far, in which the closing pattern may have begun."""

    def feed(self, text: str) -> Ended | None:
        seen = self._tail + text
        found = self._close.search(seen)
        if found is None:
            self._pieces.append(text)
            self._tail = seen[-_LONGEST_CLOSE:]
            return None
        own = found.end("own") if "own" in self._close.groupindex else found.start()
        whole = "".join(self._pieces)
        kept = whole[: len(whole) - len(self._tail)] + seen[:own]
        return Ended(self._parse(kept), seen[found.end() :])

    def finish(self) -> Ended:
        return Ended(self._parse("".join(self._pieces)) if self._may_be_open else None, "")


class ChosenBody:
    """A body whose beginning selects its reader."""

    def __init__(self, choose: Callable[[str], tuple[Body, int] | str | None]) -> None:
        """choose: for the beginning so far, the reader and the start of its text; None: more text
        is needed; a text: the reason why it is no call."""
        self._choose = choose
        self._head = ""
        self._chosen: Body | None = None

    def feed(self, text: str) -> Ended | None:
        if self._chosen is not None:
            return self._chosen.feed(text)
        self._head += text
        choice = self._choose(self._head[:LONGEST_HEAD])
        if choice is None and len(self._head) < LONGEST_HEAD:
            return None
        if choice is None or isinstance(choice, str):
            return Ended(None, self._head)
        self._chosen, start = choice
        head, self._head = self._head[start:], ""
        return self._chosen.feed(head) if head else None

    def finish(self) -> Ended:
        return Ended(None, self._head) if self._chosen is None else self._chosen.finish()


class JsonEnd:
    """Finds the end of the JSON object or array at the start of a growing text, or the place where
    it is invalid. Reads each character once, without parsing values."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False
        self.has_failed = False
        self.place = 0
        """The number of characters read of the last piece."""

    def feed(self, text: str) -> int | None:
        """The position of the end in this piece; None: it continues."""
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            match = (_IN_TEXT if self._in_text else _STRUCTURE).match(text, place)
            place = match.end() if match is not None else place
            if place == len(text):
                break
            letter = text[place]
            if self._in_text:
                self._in_text = letter == "\\"
                self._is_escaped = self._in_text
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
            else:
                self.has_failed, self.place = True, place
                return None
            place += 1
        return None


def json_calls(text: str, name: str | None = None) -> list[ToolCall] | None:
    """The calls of a JSON text; with a name, the text is the arguments. None: it is no call."""
    try:
        value = parsed(text)
        if name is not None:
            return [ToolCall(name=name, arguments=value)] if isinstance(value, dict) else None
        return [
            _json_call(each) for each in (value if isinstance(value, list) else [value])
        ] or None
    except ValueError:
        return None


def _json_call(value: Any) -> ToolCall:
    call = value.get("function", value) if isinstance(value, dict) else None
    if isinstance(call, dict) and "name" not in call:
        call = {**call, "name": call.get("tool_name")}
    if isinstance(call, str) and "name" not in value:  # {"function": name, "parameters": …}
        call = {**value, "name": call}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("it names no tool")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        arguments = parsed(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    return ToolCall(name=call["name"], arguments=arguments)
