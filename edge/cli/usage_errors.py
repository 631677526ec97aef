"""Usage errors as one sentence: the cause, and behind a semicolon the correct command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

_SEMICOLON = re.compile(r"""(?:(?>(?<!\w)'[^']*'(?!\w)|"[^"]*"|;(?! )|[^;]))*?; """)
"""The beginning of a sentence up to the first semicolon outside of quotes."""

_HABITS: Mapping[str, str] = {
    "pull": "write edge run org/name, which downloads the model if it is not here",
    "list": "write edge models",
    "ls": "write edge models",
    "show": "write edge inspect MODEL",
    "rm": "write edge cache clean for Edge's files, and hf cache for models",
    "create": "write edge quantize MODEL --out FOLDER",
    "stop": "end the command that uses the model; edge ps shows which one",
    "start": "write edge peer, or edge serve MODEL",
    "generate": "write edge run MODEL -p TEXT",
    "status": "write edge ps, or edge doctor",
    "version": "write edge --version",
}
"""Commands of other programs, and their equivalents here."""


def as_sentence(error: click.UsageError) -> click.UsageError:
    """The usage error with a remedy at the end of its sentence."""
    sentence = error.format_message()
    if not _SEMICOLON.match(sentence):
        cause, remedy = _told(error)
        sentence = f"{cause.rstrip('.')}; {remedy}"
    return click.UsageError(sentence, error.ctx)


def remedy_of(error: click.UsageError) -> str:
    """The remedy at the end of an error's sentence."""
    sentence = error.format_message()
    semicolon = _SEMICOLON.match(sentence)
    return sentence[semicolon.end() :] if semicolon else ""


def unknown_command(name: str, further: Sequence[str], near: Sequence[str]) -> str:
    """The sentence for an unknown command. further: the words behind it. near: similar commands."""
    if name == "help":
        remedy = f"write edge {' '.join([*further[:1], '--help'])}"
    elif name in _HABITS:
        remedy = _HABITS[name]
    elif near:
        remedy = f"do you mean '{near[0]}'?"
    else:
        remedy = "edge --help lists them"
    return f"No such command '{name}'; {remedy}"


def _told(error: click.UsageError) -> tuple[str, str]:
    """The cause and remedy of an error that click raised."""
    command = "edge" if error.ctx is None else error.ctx.command_path
    near: Sequence[str] = sorted(getattr(error, "possibilities", None) or ())
    cause = error.format_message()
    if isinstance(error, click.NoSuchOption):
        return error.message, (
            f"write {_one_of(near)}" if near else f"leave it out; {command} --help lists them"
        )
    if near:  # a command of a command
        return error.message, f"write {_one_of([f'{command} {each}' for each in near])}"
    if isinstance(error, click.MissingParameter):
        cause = cause.partition(". Choose from")[0]
        return cause, f"write {_with_what_is_missing(error, command)}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        wrong, remedy = of_type(error.message, error.param.type)
        return cause.replace(error.message, wrong), remedy
    if isinstance(error, click.BadOptionUsage):
        value = "takes no value" in cause or "does not take a value" in cause
        return cause, "leave out the value" if value else f"write one behind {error.option_name}"
    if cause.startswith("Got unexpected extra argument"):
        return cause, "leave it out, or put an argument with spaces in quotes"
    return cause, f"{command} --help shows its usage"


def _with_what_is_missing(error: click.MissingParameter, command: str) -> str:
    param, context = error.param, error.ctx
    if param is None or context is None:
        return f"{command} with it"
    if isinstance(param, click.Option):
        return f"{command} … {max(param.opts, key=len)} {param.make_metavar(context)}"
    return " ".join([command, *context.command.collect_usage_pieces(context)])


def of_type(message: str, kind: click.ParamType[Any]) -> tuple[str, str]:
    """The cause and remedy for a value of a wrong type."""
    value = message.partition(" is not ")[0]
    if isinstance(kind, click.Choice):
        return f"{value} is not one of its values", f"write {_one_of([*map(str, kind.choices)])}"
    if isinstance(kind, click.IntRange | click.FloatRange):
        what = "a whole number" if isinstance(kind, click.IntRange) else "a number"
        wrong = message if "in the range" in message else f"{value} is not {what}"
        return wrong, f"write {what} {_within(kind.min, kind.max)}"
    if kind.name in ("integer", "float"):
        what = "a whole number" if kind.name == "integer" else "a number"
        return f"{value} is not {what}", f"write {what}"
    if isinstance(kind, click.Path):
        return message, "write the path of one that exists"
    return message, "write another value"


def _within(least: float | None, most: float | None) -> str:
    if least is None:
        return f"of at most {most}"
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def _one_of(values: Sequence[str]) -> str:
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)
