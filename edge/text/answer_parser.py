"""A streaming parser of answers into thinking, text and tool calls. Pure.

The parts do not depend on how the text is cut into pieces, and a character is read a bounded number
of times. `tool_call_forms.py` has the forms of tool calls. Only a call of an offered tool is a
call; all else stays text, to the letter.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from edge.text.answer_forms import AnswerForm
from edge.text.answer_parts import AnswerPart, ReadAnswer, Said, Thought, ToolCall
from edge.text.channels import ChannelReader
from edge.text.thinking import ThinkingSplitter, before_partial
from edge.text.tool_call_bodies import Body, ChosenBody, Ended
from edge.text.tool_call_forms import CallForm
from edge.text.tool_types import ToolTypes

_MOST_AT_ONCE = 4096
"""Most characters per piece: cutting a text takes time by the length of its rest."""


class AnswerParser:
    """Takes pieces of an answer's text, returns its parts; call `finish` once at the end.

    thinking: the prompt begins the model's thinking. tools: the offered tools.
    """

    def __init__(
        self,
        form: AnswerForm | None = None,
        *,
        thinking: bool = False,
        tools: ToolTypes | None = None,
    ) -> None:
        """form: the model's format; None: the usual one."""
        form = AnswerForm() if form is None else form
        self._reader: ChannelReader | _MarkReader
        if form.call_form.has_channels:
            self._reader = ChannelReader(tools or (), thinking=thinking)
        else:
            self._reader = _MarkReader(form, tools or {}, thinking=thinking)

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are settled by this piece."""
        return self._reader.feed(text)

    @property
    def held(self) -> int:
        """Characters at the end of the input that are not settled, because they may become a mark
        or belong to a call."""
        return self._reader.held

    @property
    def mark_starts(self) -> frozenset[str]:
        """The characters that marks begin with. Where nothing is held, text without them belongs to
        one part."""
        return self._reader.mark_starts

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back: an unclosed call if it is complete, else text."""
        return self._reader.finish()


def read_answer(
    text: str,
    form: AnswerForm | None = None,
    *,
    thinking: bool = False,
    tools: ToolTypes | None = None,
) -> ReadAnswer:
    """A whole answer; see AnswerParser."""
    parser = AnswerParser(form, thinking=thinking, tools=tools)
    return whole_answer([*parser.feed(text), *parser.finish()])


def whole_answer(parts: Iterable[AnswerPart]) -> ReadAnswer:
    """The answer of all these parts. White space alone around calls is dropped."""
    parts = tuple(parts)
    calls = tuple(part for part in parts if isinstance(part, ToolCall))
    content = "".join(part.text for part in parts if isinstance(part, Said))
    return ReadAnswer(
        content=content.strip() if calls else content,
        reasoning="".join(part.text for part in parts if isinstance(part, Thought)).strip(),
        tool_calls=calls,
    )


def _thoughts(text: str) -> list[AnswerPart]:
    return [Thought(text)] if text else []


def _said(text: str) -> list[AnswerPart]:
    return [Said(text)] if text else []


class _MarkReader:
    """Reads answers of text with marks around thinking and calls."""

    def __init__(self, form: AnswerForm, tools: ToolTypes, *, thinking: bool) -> None:
        self._thinking = ThinkingSplitter(thinking, marks=form.thinking_marks)
        self._calls = _CallFinder(form.call_form, tools) if tools else None
        marks = (form.thinking_marks.open, form.thinking_marks.close)
        self.mark_starts = frozenset(
            mark[0] for mark in (*marks, *(form.call_form.all_marks if tools else ()))
        )

    @property
    def held(self) -> int:
        return self._thinking.held + (0 if self._calls is None else self._calls.held)

    def feed(self, text: str) -> list[AnswerPart]:
        thought, said = self._thinking.feed(text)
        found = _said(said) if self._calls is None else self._calls.feed(said)
        return [*_thoughts(thought), *found]

    def finish(self) -> list[AnswerPart]:
        thought, said = self._thinking.rest()
        found = _said(said) if self._calls is None else self._calls.finish(said)
        return [*_thoughts(thought), *found]


class _CallFinder:
    """Finds calls in text. Its state is in text, or in the body of a possible call behind a mark.
    Unmarked calls may begin while only calls have come."""

    def __init__(self, form: CallForm, tools: ToolTypes) -> None:
        self._marks = form.all_marks
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))
        self._bare = partial(form.bare, tools)
        self._tools = tools
        self._mark = ""
        self._body: Body | None = None
        self._pieces: list[str] = []
        """The text that the body was fed."""
        self._body_characters = 0
        self._tail = ""
        """Text that may become a mark."""
        self._is_bare = False
        """Whether the body is of an unmarked call."""
        self._is_after_call = False
        """Whether white space now separates calls."""
        self._begin_bare()

    @property
    def held(self) -> int:
        if self._body is None:
            return len(self._tail)
        return len(self._mark) + self._body_characters

    def feed(self, text: str) -> list[AnswerPart]:
        return joined(self._read(text, is_over=False))

    def finish(self, text: str) -> list[AnswerPart]:
        return joined(self._read(text, is_over=True))

    def _read(self, text: str, *, is_over: bool) -> Iterator[AnswerPart]:
        unread = deque(_cut(text))
        while unread or (is_over and (self._body is not None or self._tail)):
            piece = unread.popleft() if unread else ""
            is_last = is_over and not unread
            if self._body is None:
                yield from self._in_text(piece, unread, is_last=is_last)
            else:
                yield from self._in_body(self._body, piece, unread, is_last=is_last)

    def _in_text(self, piece: str, unread: deque[str], *, is_last: bool) -> Iterator[AnswerPart]:
        text, self._tail = self._tail + piece, ""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        found = self._any_mark.search(text)
        if found is None:
            kept = len(text) if is_last else min(before_partial(text, mark) for mark in self._marks)
            yield Said(text[:kept])
            self._tail = text[kept:]
            return
        yield Said(text[: found.start()])
        self._mark, self._body = found[0], self._marks[found[0]](self._tools)
        self._body_characters = 0
        if found.end() < len(text):
            unread.appendleft(text[found.end() :])

    def _in_body(
        self, body: Body, piece: str, unread: deque[str], *, is_last: bool
    ) -> Iterator[AnswerPart]:
        self._pieces.append(piece)
        self._body_characters += len(piece)
        ended = body.feed(piece) if piece else None
        if ended is None and is_last:
            ended = body.finish()
        if ended is None:
            return
        calls, was_bare = ended.calls, self._is_bare
        is_known = calls is not None and all(call.name in self._tools for call in calls)
        if calls is None or (was_bare and not is_known):
            yield from self._no_call(ended, unread)
            return
        if is_known:
            yield from calls
        else:
            text = "".join(self._pieces)
            yield Said(self._mark + text[: len(text) - len(ended.after)])
        unread.extendleft(reversed([*_cut(ended.after)]))
        self._pieces, self._body, self._is_after_call = [], None, is_known
        if was_bare:
            self._begin_bare()

    def _no_call(self, ended: Ended, unread: deque[str]) -> Iterator[AnswerPart]:
        """Yield the mark and the text behind it as text, up to the next mark."""
        text = "".join(self._pieces)
        is_bare, self._pieces, self._body, self._is_bare = self._is_bare, [], None, False
        place = 0
        if not is_bare:
            of_body = text[: len(text) - len(ended.after)]
            places = [found.start() for found in self._any_mark.finditer(of_body)]
            place = (
                places[-1] if places else min(before_partial(of_body, mark) for mark in self._marks)
            )
            yield Said(self._mark + text[:place])
        unread.extendleft(reversed([*_cut(text[place:])]))

    def _begin_bare(self) -> None:
        self._mark, self._is_bare, self._body_characters = "", True, 0
        self._body = ChosenBody(self._bare)


def _cut(text: str) -> Iterator[str]:
    return (text[at : at + _MOST_AT_ONCE] for at in range(0, len(text), _MOST_AT_ONCE))


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The parts with neighbouring texts of one kind joined, and without empty ones."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCall):
            found.append(part)
        elif isinstance(part, Said) and isinstance(last, Said):
            found[-1] = Said(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        elif part.text:
            found.append(part)
    return found
