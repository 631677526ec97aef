"""Conversations of clients, arranged into turns that chat templates accept. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge.server.pictures import Content, Part, as_parts

Message = Mapping[str, object]

_BETWEEN = "\n\n"


def turns(messages: Sequence[Message], *, joins: bool = False) -> list[Message]:
    """The messages with leading system messages joined, as many templates require.

    joins: also join neighbours of a user or of an assistant: thoughts, texts and calls. Some
    dialects have these as separate items or messages.
    """
    found: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        is_first = role == "system" and len(found) == 1
        if found and found[-1][0]["role"] == role and (is_first or (joins and role in _JOINED)):
            found[-1].append(message)
        else:
            found.append([message])
    return [each[0] if len(each) == 1 else _joined(each) for each in found]


def arranged(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other arrangements, for templates that refuse these messages.

    First neighbours of one role joined, for templates whose roles must alternate. Then late system
    messages as the user's; all of them at the beginning; and all of them as the user's, for
    templates without a system role. Each of these three also with neighbours joined.
    """
    tried: list[Sequence[Message]] = [messages]
    for arrange in (list, reminded, _gathered, _without_system):
        for found in (arrange(messages), turns(arrange(messages), joins=True)):
            if found not in tried:
                tried.append(found)
                yield found


def _gathered(messages: Sequence[Message]) -> list[Message]:
    system = [each for each in messages if each["role"] == "system"]
    return turns([*system, *(each for each in messages if each["role"] != "system")])


def _without_system(messages: Sequence[Message]) -> list[Message]:
    found = _gathered(messages)
    if found[0]["role"] == "system":
        found[0] = {**found[0], "role": "user"}
        if len(found) > 1 and found[1]["role"] == "user":
            found[:2] = [_joined(found[:2])]
    return found


def reminded(messages: Sequence[Message]) -> list[Message]:
    """The messages with later system messages as the user's, for templates that take only a first
    one. They are marked as Claude Code marks its additions to a user's message."""
    found: list[list[Message]] = []
    is_late = False
    for i, each in enumerate(messages):
        was_late, is_late = is_late, bool(i) and each["role"] == "system"
        reminder = f"<system-reminder>\n{each.get('content')}\n</system-reminder>"
        message = {"role": "user", "content": reminder} if is_late else each
        if (is_late or was_late) and found[-1][0]["role"] == message["role"] == "user":
            found[-1].append(message)
        else:
            found.append([message])
    return [each[0] if len(each) == 1 else _joined(each) for each in found]


_JOINED = ("user", "assistant")


def _joined(messages: Sequence[Message]) -> Message:
    found: dict[str, object] = {}
    for message in messages:
        found |= message
    for name in ("content", "reasoning_content"):
        contents: list[Any] = [each[name] for each in messages if each.get(name)]
        if contents or name in found:
            found[name] = _together(contents)
    calls = [call for each in messages for call in _calls(each)]
    return found | ({"tool_calls": calls} if calls else {})


def _together(contents: Sequence[Content]) -> Content:
    if all(isinstance(each, str) for each in contents):
        return _BETWEEN.join(map(str, contents))
    found: list[Part] = []
    for content in contents:
        found += [*as_parts(_BETWEEN), *as_parts(content)] if found else as_parts(content)
    return found


def _calls(message: Message) -> Sequence[object]:
    calls = message.get("tool_calls", ())
    assert isinstance(calls, Sequence)
    return calls
