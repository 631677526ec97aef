"""docs/reference.md, made from the commands and the public names themselves.

    python -m tests.support.reference_page

writes it; a test compares it with what it should be.

Other tools lack something: griffe shows how a default is written (`option(...)`), not what it is;
pdoc leaves out the defaults of slotted dataclasses, and neither knows the options of commands.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import click

import edge
import edge.errors
from edge.api.local_peers import LocalSettings
from edge.cli.main import cli
from edge.models.unchecked_config import Rope
from edge.option_fields import option_facts
from edge.partition import Stage, Term
from edge.partition.fit import placement
from edge.protocol.step_times import StepTimes
from edge.studies.inspection import HeldAs, KvFacts, LayerKind, StoredType
from edge.text.tokenizer_facts import TokenizerFacts
from edge.weights import formats

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"

HEAD = """\
# Reference

This page is made from the program: `python -m tests.support.reference_page` writes it.
Every command says the same with `--help`.

Sizes are bytes, or have a unit: `500MiB`, `2GiB`.
Keys and caches are where the system keeps a user's settings and caches, unless
[environment variables](guide/environment.md) say otherwise.
The exit code is 0, 1 after an error (one sentence on standard error), 2 for wrong usage, or
130 after Ctrl-C.
"""

PARTS: dict[str, tuple[type, ...]] = {
    "Inspection": (LayerKind, Rope, StoredType, HeldAs, KvFacts, TokenizerFacts),
    "Plan": (Stage,),
    "Estimate": (Term,),
    "PeerTimes": (StepTimes,),
}
"""What fields of public classes are of."""

LITERALS: dict[str, ModuleType] = {
    "Dtype": formats,
    "KvDtype": formats,
    "Parallel": placement,
}
"""Where public names for a few words are given their meaning."""

METAVARS = {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT": "NUMBER"}

WIDTH = 96


def page() -> str:
    return "\n".join([HEAD, *_commands(), *_python()]).rstrip() + "\n"


def _commands() -> Iterator[str]:
    context = click.Context(cli, info_name="edge")
    commands: dict[str, click.Command] = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        commands[name] = command
        if isinstance(command, click.Group):
            for own in command.list_commands(context):
                commands[f"{name} {own}"] = command.commands[own]
    users: dict[str, list[str]] = {}
    """Each option, as a row of a table, and the commands that have it."""
    for name, command in commands.items():
        for option in _options(command):
            users.setdefault(option, []).append(name)
    yield "## Commands\n"
    for name, command in commands.items():
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        yield f"### edge {name}\n"
        yield f"`edge {name} {usage}`\n"
        yield from _help(command.help or "")
        yield from _table([option for option, names in users.items() if names == [name]])
    yield "### Options of several commands\n"
    for group in dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1):
        yield ", ".join(f"`edge {name}`" for name in group) + ":\n"
        yield from _table([option for option, names in users.items() if tuple(names) == group])


def _help(text: str) -> Iterator[str]:
    """The paragraphs; what click is told to leave as it is becomes a block."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph[2:]}\n```\n"
        else:
            yield " ".join(paragraph.split()) + "\n"


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        record = option.get_help_record(click.Context(command))
        if isinstance(option, click.Option) and record is not None:
            names, text = (" ".join(cell.split()).replace("|", "\\|") for cell in record)
            for long, short in METAVARS.items():
                names = names.replace(long, short)
            yield f"| `{names}` | {text} |"


def _table(options: list[str]) -> Iterator[str]:
    if options:
        yield "\n".join(["| option | meaning |", "|---|---|", *options]) + "\n"


def _python() -> Iterator[str]:
    yield "## Python\n"
    yield "`import edge` is the documented import, and `partition` for plans by hand.\n"
    for name in edge.__all__:
        value = getattr(edge, name)
        if isinstance(value, type) and not issubclass(value, Exception):
            yield f"### edge.{name}\n"
            yield "```text\n" + "\n".join(_class(value)).strip() + "\n```\n"
        elif get_origin(value) is Literal:
            yield f"### edge.{name}\n"
            yield f"```text\n{_note_on(name)}\n\n{_words(value)}\n```\n"
        elif inspect.isfunction(value):
            yield f"### edge.{name}\n"
            yield "```text\n" + "\n".join(_member(name, staticmethod(value))).strip() + "\n```\n"
    for name, parts in PARTS.items():
        yield f"### What `edge.{name}` consists of\n"
        for value in parts:
            yield f"#### {value.__name__}\n"
            yield "```text\n" + "\n".join(_class(value)).strip() + "\n```\n"
    yield "### Settings of `Cluster.local`\n"
    yield "```text\n" + "\n".join(_settings(LocalSettings)).strip() + "\n```\n"
    yield "### Errors\n"
    yield f"```text\n{inspect.getdoc(edge.errors)}\n```"


def _note_on(name: str) -> str:
    """What stands under a name in the module that it is of."""
    body = ast.parse(inspect.getsource(LITERALS[name])).body
    for each, note in itertools.pairwise(body):
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
            assert isinstance(note, ast.Expr)
            assert isinstance(note.value, ast.Constant)
            return inspect.cleandoc(str(note.value.value))
    raise AssertionError(f"nothing is said of edge.{name}")


def _words(value: Any) -> str:
    return "One of " + ", ".join(f'"{each}"' for each in get_args(value))


def _class(value: type) -> Iterator[str]:
    yield inspect.cleandoc(value.__doc__ or "")
    yield ""
    if dataclasses.is_dataclass(value):
        bases = [each for each in reversed(value.__mro__) if dataclasses.is_dataclass(each)]
        notes = {name: note for each in bases for name, note in _field_notes(each).items()}
        for field in dataclasses.fields(value):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            named = vars(sys.modules[value.__module__]).get(str(field.type))
            kind = get_args(named)[0] if get_origin(named) is Annotated else field.type
            yield f"{field.name}: {_type(kind)}{default}"
            facts = option_facts(field)
            if facts is not None:
                yield from _indented(textwrap.fill(" ".join(facts.help.split()), WIDTH))
            yield from _indented(notes.get(field.name))
        yield ""
    ours = [each for each in reversed(value.__mro__) if each.__module__.startswith("edge.")]
    members = {name: member for each in ours for name, member in vars(each).items()}
    for name, member in members.items():
        if not name.startswith("_"):
            yield from _member(name, member)


def _settings(value: type) -> Iterator[str]:
    """A dictionary's keys."""
    yield inspect.cleandoc(value.__doc__ or "")
    yield ""
    notes = _field_notes(value)
    for name, annotation in value.__annotations__.items():
        yield f"{name}: {getattr(annotation, '__forward_arg__', annotation)}"
        yield from _indented(notes.get(name))


def _field_notes(value: type) -> dict[str, str]:
    """The strings that stand under fields in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(note.value.value)
        for field, note in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }


def _member(name: str, member: Any) -> Iterator[str]:
    """A method's signature or a property's type, and its docstring."""
    is_static = isinstance(member, staticmethod)
    is_property = isinstance(member, property)
    function = member.fget if is_property else getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return
    signature = inspect.signature(function)
    result = _type(signature.return_annotation)
    if is_property:
        yield f"{name}: {result}"
    else:
        parameters = list(signature.parameters.values())[0 if is_static else 1 :]
        shown = list(_parameters(parameters))
        prefix = "async " if inspect.iscoroutinefunction(function) else ""
        line = f"{prefix}{name}({', '.join(shown)}) -> {result}"
        if len(line) > WIDTH:
            lines = "".join(f"    {parameter},\n" for parameter in shown)
            line = f"{prefix}{name}(\n{lines}) -> {result}"
        yield line
    yield from _indented(inspect.getdoc(function))
    yield ""


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.items()
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield (
            "".join(star for kind, star in stars if parameter.kind is kind)
            + f"{parameter.name}: {_type(parameter.annotation)}{default}"
        )


def _type(annotation: Any) -> str:
    """As it stands in the source, where annotations are not evaluated."""
    if isinstance(annotation, type):
        return annotation.__name__
    return re.sub(r"\b(?:edge|typing|collections)\.(?:\w+\.)*", "", str(annotation))


def _indented(text: str | None) -> Iterator[str]:
    if text:
        yield textwrap.indent(text, "    ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
