"""Assistant prefill: conversations whose last message is the beginning of an answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.errors import RequestError

Messages = Sequence[Mapping[str, object]]

_HERE = "\ue000\ue001"
"""Characters of no script that mark the place of the content in a rendered template, and show what
the template strips of it."""


def begun_answer(messages: Messages) -> tuple[Messages, bool]:
    """The messages to render, and whether the model continues the last one.

    A last message with tool calls is complete, and one without text is left out.
    """
    if len(messages) < 2:
        return messages, False
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return messages, False
    if not isinstance(content, str) or not content.strip():
        return messages[:-1], False
    return [*messages[:-1], {**last, "content": content + _HERE}], True


def up_to_answer(prompt: str) -> str:
    """The rendered prompt, cut behind the prefilled text. Raises RequestError if the template
    changed that text."""
    before, here, _after = prompt.rpartition(_HERE)
    if not here:
        raise RequestError(
            "the model's chat template cannot continue an answer",
            remedy="end the messages with one of the user",
        )
    return before.replace(_HERE, "")
