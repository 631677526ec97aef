"""Options of a command from the fields of a dataclass. Imports only what a daemon needs, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from edge.option_fields import OptionFacts, option_facts

F = TypeVar("F", bound=Callable[..., Any])

_AS_GIVEN = "edge.as_given"


def field_options(
    described: type[Any],
    *,
    only: Collection[str] = (),
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """An option for each field of a dataclass that was made by `option`, by the field's name.

    defaults: this command's own, by field. An omitted option is None if only the dataclass knows
    its default.
    """
    hints = get_type_hints(described)

    def decorate(function: F) -> F:
        for each in reversed(fields(described)):
            facts = option_facts(each)
            is_wanted = each.name in only if only else each.name not in leave_out
            if facts is not None and is_wanted:
                default = None if each.default is MISSING else each.default
                default = (defaults or {}).get(each.name, default)
                function = _click_option(each.name, hints[each.name], default, facts)(function)
        return function

    return decorate


def given_options(name: str, described: type[Any], **chosen: Any) -> Callable[[F], F]:
    """Give the command `name`: a dataclass made of its `field_options`."""
    names = {each.name for each in fields(described)}

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(**others: Any) -> Any:
            given = {each: others.pop(each) for each in names & others.keys()}
            return function(**{name: described(**given)}, **others)

        return field_options(described, **chosen)(command)  # type: ignore[return-value]

    return decorate


def as_given(context: click.Context, name: str) -> Any:
    """The text of an option's value as the user wrote it, before it was parsed."""
    return context.meta.get(_AS_GIVEN, {}).get(name, context.params.get(name))


def _parsed(
    parse: Callable[[str], Any], context: click.Context, parameter: click.Parameter, text: Any
) -> Any:
    if isinstance(text, tuple):
        text = ",".join(text) or None
    if text is None:
        return None
    value = parse(text)
    context.meta.setdefault(_AS_GIVEN, {})[parameter.name] = text
    return value


def _click_option(name: str, hint: Any, default: Any, facts: OptionFacts) -> Callable[[F], F]:
    flags = facts.flags or (f"--{name.replace('_', '-')}",)
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    shown: dict[str, Any] = {"default": default, "show_default": default is not None}
    if (parse := facts.parse) is not None:
        shown = {"callback": functools.partial(_parsed, parse), "multiple": facts.repeats}
    elif choices := facts.choices or (get_args(hint) if get_origin(hint) is Literal else ()):
        named = {str(choice): choice for choice in choices}
        shown |= {
            "type": click.Choice(list(named)),
            "default": None if default is None else str(default),
            "callback": lambda _context, _parameter, value: named.get(value),
        }
    elif isinstance(default, tuple):
        shown = {"multiple": True}
    elif kinds == [bool] and default is None:
        words = {"on": True, "off": False}
        shown |= {
            "type": click.Choice(list(words)),
            "callback": lambda _context, _parameter, word: words.get(word),
        }
    elif kinds == [bool]:
        shown = {"is_flag": True}
    elif kinds == [int] and (facts.at_least, facts.at_most) != (None, None):
        shown["type"] = click.IntRange(facts.at_least, facts.at_most)
    else:
        shown["type"] = kinds[0]
    return click.option(*flags, name, metavar=facts.metavar, help=facts.help, **shown)
