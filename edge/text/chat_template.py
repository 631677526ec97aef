"""Chat templates: messages to the prompt format that a model was trained on.

Knows the names that templates expect (those of `transformers`), but neither tokens nor Jinja. A
template is an untrusted program from the checkpoint: it sees copies of plain data only, in a
process of its own (`template_process.py`) with limits of time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from edge.errors import CheckpointError, RequestError
from edge.host.confined_process import ConfinedProcess, Limits
from edge.text.message_texts import as_parts
from edge.text.template_turns import template_turns

_PROGRAM = Path(__file__).with_name("template_process.py")
_CPU_S = 1.5
"""Seconds of CPU to compile and render a template; published ones take 0.1 s together."""
_WALL_S = 60.0
"""Seconds of wall time, for a process that uses no CPU time."""
_MEMORY_BYTES = 512 << 20
_MAX_TEXT_BYTES = 32 << 20
"""Most bytes of the messages, and of the prompt."""
_PROBE = "Hello"
_MAX_SOURCE_CHARACTERS = 1 << 20  # the longest published one has 20,000


class ChatTemplate:
    """A chat template. Its process starts with the first chat; `close` ends it."""

    def __init__(self, source: str, origin: str) -> None:
        """origin: the file that it comes from. Raises CheckpointError for a template that is too
        long."""
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise CheckpointError(
                f"{origin}: the chat template has {len(source):,} characters, and "
                f"{_MAX_SOURCE_CHARACTERS:,} are the most that are read"
            )
        self._source = source
        self._origin = origin
        self._process = ConfinedProcess(
            _PROGRAM,
            Limits(
                cpu_s=_CPU_S,
                wall_s=_WALL_S,
                memory_bytes=_MEMORY_BYTES,
                reply_bytes=_MAX_TEXT_BYTES,
            ),
        )

    @property
    def source(self) -> str:
        """The Jinja source."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt as text. variables: further names for the template.

        Raises RequestError for data that JSON cannot hold, and for messages that the template
        refuses; CheckpointError, naming `origin`, for a template that is not valid Jinja or exceeds
        the limits of time and memory.
        """
        values: dict[str, object] = {"documents": None, **variables}
        values["tools"] = tools
        values["add_generation_prompt"] = add_generation_prompt
        try:
            values = _plain_object(values)
            turns = template_turns(self._source, [*map(_plain_object, messages)])
            values["messages"] = [*map(as_parts, turns)] if self._needs_parts else turns
            request = self._request(values)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the chat messages cannot be written as JSON: {error}", remedy="use JSON's types"
            ) from error
        if len(request) > _MAX_TEXT_BYTES:
            raise RequestError(
                f"the chat messages are longer than {_MAX_TEXT_BYTES >> 20} MiB as JSON",
                remedy="send less",
            )
        kind, content = self._process.ask(request)
        text = content.decode("utf-8", "surrogatepass")
        if kind == "rendered":
            return text
        if kind == "refused":
            raise RequestError(
                f"the model's chat template refused these messages: {text}",
                remedy="change the roles or their order",
            )
        remedy = "replace it with the one of the model's publisher"
        if kind == "invalid":
            raise CheckpointError(
                f"{self._origin}: the chat template is not valid Jinja ({text})", remedy=remedy
            )
        raise CheckpointError(
            f"{self._origin}: the chat template cannot be used ({text or 'its process ended'})",
            remedy=remedy,
        )

    def _request(self, values: Mapping[str, object]) -> bytes:
        return json.dumps({"source": self._source, "values": values}).encode()

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template writes the parts of a message, and nothing of a text. Some that take
        pictures do."""
        if "image" not in self._source:
            return False
        message = {"role": "user", "content": _PROBE}
        values = {"add_generation_prompt": True, "tools": None, "documents": None}
        of_text, of_parts = (
            self._process.ask(self._request({**values, "messages": [each]}))[1]
            for each in (message, as_parts(message))
        )
        return _PROBE.encode() not in of_text and _PROBE.encode() in of_parts

    def close(self) -> None:
        """End its process; another chat starts a new one."""
        self._process.close()


def _plain_object(message: Mapping[str, object]) -> dict[str, object]:
    """A copy in JSON's types, as methods of other objects could escape the sandbox."""
    return {str(_plain(name)): _plain(item) for name, item in message.items()}


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError(
        f"chat messages may hold text, numbers, lists and objects, not {type(value).__name__}",
        remedy="give one of these",
    )
