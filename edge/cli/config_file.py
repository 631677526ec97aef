"""`--config`: a TOML file of a command's options. The command line outweighs the file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from edge.cli.field_options import as_given
from edge.cli.usage_errors import of_type
from edge.errors import RequestError

F = TypeVar("F", bound=Callable[..., Any])

_MOST_BYTES = 64 << 10
_OF_THE_COMMAND_LINE = frozenset({"config", "print_config", "help"})
_WHENCE = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}


def config_option(function: F) -> F:
    """Give a command `--config`, a file that can set all its other options."""
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_into_defaults,
        metavar="FILE",
        help='Options from a TOML file, by their names, such as memory = "4GiB"; the command line '
        "outweighs it.",
    )(function)


def read_config(path: Path, context: click.Context) -> dict[str, Any]:
    """The command's options in a file, by the names of its parameters.

    Raises RequestError for an unreadable file, an unknown name or an invalid value.
    """
    import tomllib  # slow to import, and a daemon without a file does not need it

    from edge.offload import read_file

    try:
        said = tomllib.loads(read_file(path, _MOST_BYTES).decode())
    except OSError as error:
        raise RequestError(
            f"--config {path}: {error.strerror}", remedy="name a file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--config {path}: {error}", remedy="write it in TOML") from error
    options = {_name(option): option for option in _settable(context.command)}
    found = {}
    for name, value in said.items():
        if (option := options.get(name)) is None:
            near = difflib.get_close_matches(name, options, 1)
            instead = f"do you mean {near[0]}?" if near else f"there are {', '.join(options)}"
            raise RequestError(f"--config {path}: there is no option {name!r:.80}", remedy=instead)
        _check(option, value, f"--config {path}: {name}")
        try:
            option.process_value(context, value)
        except (click.BadParameter, RequestError) as error:
            said_why, remedy = str(error), None
            if isinstance(error, click.BadParameter):
                said_why, remedy = of_type(error.message, option.type)
            raise RequestError(f"--config {path}: {name}: {said_why}", remedy=remedy) from error
        found[str(option.name)] = value
    return found


def as_toml(context: click.Context, resolved: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a file with the effective options, each with its origin.

    resolved: values that the command fills in itself, by parameter.
    """
    for option in _settable(context.command):
        name = str(option.name)
        value = as_given(context, name)
        if value is None:
            value = resolved.get(name)
        source = context.get_parameter_source(name)
        whence = "default" if source is None else _WHENCE.get(source, "default")
        if value is None or value == ():
            stated = re.search(r"\[default: (.+)\]", option.help or "")
            yield f"# {_name(option)}: {stated[1] if stated else 'not set'}"
        else:
            yield f"{_name(option)} = {_value(value)}  # {whence}"


def _read_into_defaults(
    context: click.Context, _parameter: click.Parameter, path: Path | None
) -> None:
    if path is not None:
        context.default_map = read_config(path, context)


def _settable(command: click.Command) -> Iterator[click.Option]:
    for option in command.params:
        if (
            isinstance(option, click.Option)
            and not option.hidden
            and option.name not in _OF_THE_COMMAND_LINE
        ):
            yield option


def _name(option: click.Option) -> str:
    return max(option.opts, key=len).removeprefix("--")


def _check(option: click.Option, value: object, where: str) -> None:
    """Raises RequestError for a value of another type than the option's, which click may accept."""
    if option.is_flag:
        wanted, is_good = "true or false", isinstance(value, bool)
    elif option.multiple:
        wanted = "a list of texts"
        is_good = isinstance(value, list) and all(isinstance(each, str) for each in value)
    elif isinstance(option.type, click.types.IntParamType):
        wanted = "a whole number"
        is_good = isinstance(value, int) and not isinstance(value, bool)
    else:
        wanted = "a text"
        is_good = isinstance(value, str | int) and not isinstance(value, bool)
    if not is_good:
        raise RequestError(f"{where}: {value!r:.80} is not {wanted}", remedy=f"write {wanted}")


def _value(value: object) -> str:
    """A value in TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
