"""Conversations that end with the beginning of an answer, which the model goes on with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.errors import RequestError

Messages = Sequence[Mapping[str, object]]

_HERE = "\ue000\ue001"
"""Characters of no script: they tell where a template writes the content, and what it strips of
it."""


def begun_answer(messages: Messages) -> tuple[Messages, bool]:
    """The messages to be rendered, and whether the last one is to be gone on with.

    One that calls tools is whole, and one that says nothing is left out.
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
    """What a template wrote, up to the end of what was begun. Raises RequestError where it wrote
    something else."""
    before, here, _after = prompt.rpartition(_HERE)
    if not here:
        raise RequestError(
            "the model's chat template cannot go on with an answer",
            remedy="let the last message be one of the user",
        )
    return before.replace(_HERE, "")
