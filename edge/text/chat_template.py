"""Chat templates: messages to the prompt a model was trained on.

Knows Jinja and the names templates expect (those of `transformers`); knows nothing of tokens.
A template comes with the checkpoint and is somebody else's program: it runs in Jinja's sandbox and
sees copies of plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from edge.errors import CheckpointError, RequestError

# Reasoning comes under several names; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, origin: str) -> None:
        """Raises CheckpointError, naming `origin`, for a template that is not valid Jinja."""
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"{origin}: the chat template is not valid Jinja ({error}); "
                "replace it with the one of the model's publisher"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt as text. `variables` are further names the template may use.

        Raises RequestError for no messages, for data that JSON could not hold, and for whatever the
        template itself refuses.
        """
        if not messages:
            raise RequestError("a chat needs at least one message, and there is none")
        values: dict[str, object] = {"documents": None, **variables}
        values["messages"] = [_message(message) for message in messages]
        values["tools"] = tools
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(_plain(values))
        except RequestError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(
                f"the chat template in {self._origin} refused these messages: "
                f"{error or type(error).__name__}"
            ) from error


def _message(message: Mapping[str, object]) -> dict[str, object]:
    """The message without absent values, its reasoning under the names that templates read."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"a chat message must be an object with role and content, not {message!r}"
        )
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present


def _plain(value: object) -> object:
    """A copy in JSON's types: the sandbox cannot know what methods of other objects would do."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError(
        f"chat messages may hold text, numbers, lists and objects, not {type(value).__name__}"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_DictMaker(),
        namespace=_TemplateNamespace,
    )
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        # No named parameters, as in Jinja's own, so that a template may store any name.
        self, *rest = args
        stored = dict(*rest, **values)
        for name in stored:
            _check_name(name)
        Namespace.__init__(self, stored)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


class _DictMaker:
    """`dict(...)` and `dict.fromkeys(...)` for templates, with nothing else to climb on."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, names: Iterable[Any], value: object = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    """The local time: templates write today's date into the prompt."""
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: unlike Jinja's own filter, no HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
