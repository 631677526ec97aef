"""Messages with contents as text, from messages with lists of parts of text and pictures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from edge.errors import RequestError, shown

TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of text parts."""
PICTURE = {"type": "image"}
"""A picture in messages for a template. Which one it is follows from its place among them."""

_EXAMPLE = '[{"role": "user", "content": "..."}]'
_OF_TOOLS = ("tool", "ipython", "environment", "observation")
"""The roles of tool results, which templates accept as data, too."""


def with_texts(
    messages: Sequence[Mapping[str, object]], *, pictures: bool = False
) -> list[Mapping[str, object]]:
    """The messages with lists of parts joined to texts; pictures: but for lists with a `PICTURE`.

    Raises RequestError for an invalid list of messages, and for other parts than text.
    """
    given: object = messages
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise RequestError(
            f"messages are a list of objects with role and content, not {shown(given)}",
            remedy=f"write {_EXAMPLE}",
        )
    if not messages:
        raise RequestError(
            "a chat needs at least one message, and there is none",
            remedy="give one with role and content",
        )
    return [_with_text(each, pictures) for each in messages]


def as_parts(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with a text as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_text(message: Mapping[str, object], pictures: bool) -> Mapping[str, object]:
    given: object = message
    if not isinstance(given, Mapping):
        raise RequestError(
            f"a chat message must be an object with role and content, not {shown(given)}",
            remedy=f"write {_EXAMPLE}",
        )
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        raise RequestError(
            f"a chat message has no role, or one that is no text: {shown(dict(message))}",
            remedy=f"write {_EXAMPLE}",
        )
    if not isinstance(content, list | tuple | Mapping):
        return message
    if isinstance(content, list | tuple) and all(map(_is_part, content)):
        parts = cast(Sequence[Mapping[str, object]], content)
        if pictures and PICTURE in parts:
            return {**message, "content": [_part(each) for each in parts]}
        return {**message, "content": "".join(map(_text_of, parts))}
    if role in _OF_TOOLS:
        return message
    raise RequestError(
        f"the content of a message must be a text or a list of its parts, not {shown(content)}",
        remedy='a part is {"type": "text", "text": "..."}',
    )


def _is_part(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


def _part(part: Mapping[str, object]) -> Mapping[str, object]:
    return part if part == PICTURE else {"type": "text", "text": _text_of(part)}


def _text_of(part: Mapping[str, object]) -> str:
    kind, text = part["type"], part.get("text")
    if kind not in TEXT_PARTS:
        raise RequestError(
            f"a message has a part of type {shown(kind)}, and only text and images are read",
            remedy="leave it out, or describe it in text",
        )
    if not isinstance(text, str):
        raise RequestError(
            f"a part of a message has no text: {shown(dict(part))}",
            remedy='write {"type": "text", "text": "..."}',
        )
    return text
