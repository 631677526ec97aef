"""What the types of official clients say of requests: their kinds, and an example of each."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typing_extensions

KNOWN: Mapping[str, Any] = {
    "arguments": "{}",
    "include": ["message.output_text.logprobs"],
    "input_schema": {"type": "object"},
    "schema": {"type": "object"},
    "parallel_tool_calls": False,
    "call_id": "x",
    "data": "eA==",
}
"""What no type says: of which form a text is, or what an object must have; and what changes."""

ALWAYS = (
    *("type", "call_id", "text", "reasoning", "content", "effort", "schema", "tabs"),
    "image_url",
)
"""Fields that no type needs, and that say something."""


def kinds(union: Any) -> Iterator[Any]:
    """What a union is made of, and what the unions in it are made of."""
    union = getattr(union, "__value__", union)
    origin = get_origin(union)
    if origin in {Annotated, typing_extensions.Required, typing_extensions.NotRequired}:
        yield from kinds(get_args(union)[0])
    elif origin in {Union, types.UnionType}:
        for each in get_args(union):
            yield from kinds(each)
    elif union is not type(None) and not hasattr(union, "model_fields"):  # that are of replies
        yield union


def hints_of(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def example(of: Any, name: str = "", *, is_whole: bool = False) -> Any:
    """The least that is of this type, in the field of this name; is_whole: with all that it may
    have."""
    kind = next(kinds(of))
    origin = get_origin(kind) or kind
    if name in KNOWN:
        return KNOWN[name]
    if origin is Literal:
        return get_args(kind)[-1]
    if typing_extensions.is_typeddict(kind):
        return {
            each: example(hint, each)
            for each, hint in hints_of(kind).items()
            if is_whole or get_origin(hint) is typing_extensions.Required or each in ALWAYS
        }
    if origin is str or not isinstance(origin, type):
        return "https://x.example/x" if name.endswith("url") else "x"
    if issubclass(origin, Mapping):
        return {}
    if issubclass(origin, Iterable):
        return [example(each) for each in get_args(kind)[:1]] or ["x"]
    return {bool: True, int: 2, float: 0.5}.get(origin, "x")


def name_of(kind: Any) -> str:
    """What says in JSON which it is: its type or its role, or else the word itself."""
    if not typing_extensions.is_typeddict(kind):
        return "word"
    hints = hints_of(kind)
    words = next(kinds(hints.get("type", hints.get("role"))))
    return str(get_args(words)[0])
