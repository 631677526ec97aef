"""A field of a dataclass becomes an option of the command line, and nothing else is needed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from edge.answers.terms import GenerationOptions
from edge.cli.commands import peer, plan, run
from edge.cli.field_options import field_options
from edge.option_fields import option, option_facts
from edge.peer.settings import PeerSettings
from edge.planning.load_options import LoadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    colour: Literal["red", "blue"] = option("red", help="What it looks like.")
    num_wheels: int = option(4, choices=(2, 4), help="How it rolls.")
    top_speed: float | None = option(None, metavar="KM/H", help="How fast at most.")
    seats: int = option(2, flags=("-s", "--seats"), at_least=1, at_most=9, help="For whom.")
    length_mm: int = option(9, flags=("--length",), parse=lambda text: 10 * int(text), help="cm.")
    maker: str = option(default_factory=lambda: "us", help="Who made it.")
    name: str | tuple[str, ...] = option((), help="What it is called; may be repeated.")
    is_loud: bool = option(False, help="Heard from afar.")
    is_clean: bool | None = option(None, help="Or as it comes.")
    marks: tuple[str, ...] = option(
        (), repeats=True, parse=lambda text: tuple(text.split(",")), help="On it."
    )
    inside: object = None


@click.command()
@field_options(Wishes)
def order(**named: object) -> None:
    given: Any = {name: value for name, value in named.items() if value is not None}
    click.echo(repr(Wishes(**given)))


def outcome(*arguments: str) -> str:
    return CliRunner().invoke(order, arguments).output.strip()


def test_defaults_are_those_of_the_fields() -> None:
    assert outcome() == repr(Wishes())


def test_each_is_read_as_its_type() -> None:
    told = outcome(
        *("--colour", "blue", "--num-wheels", "2", "--top-speed", "9", "-s", "3"),
        *("--length", "7", "--maker", "them", "--name", "a", "--name", "b", "--is-loud"),
        *("--is-clean", "off", "--marks", "x,y", "--marks", "z"),
    )
    assert told == repr(
        Wishes(
            colour="blue",
            num_wheels=2,
            top_speed=9.0,
            seats=3,
            name=("a", "b"),
            is_loud=True,
            is_clean=False,
            marks=("x", "y", "z"),
            length_mm=70,
            maker="them",
        )
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--colour", "green"), "'green' is not one of 'red', 'blue'"),
        (("--num-wheels", "3"), "'3' is not one of '2', '4'"),
        (("--seats", "10"), "10 is not in the range 1<=x<=9"),
        (("--inside", "x"), "No such option"),
    ],
    ids=str,
)
def test_what_is_not_allowed(arguments: tuple[str, ...], message: str) -> None:
    assert message in outcome(*arguments)


def test_help_is_that_of_the_fields() -> None:
    told = outcome("--help")
    assert "--colour [red|blue]" in told
    assert "How it rolls.  [default: 4]" in told
    assert "--top-speed KM/H" in told


def test_commands_have_an_option_for_every_field() -> None:
    """So that a new option of a load or an answer is one field."""
    wanted = {each.name for each in fields(LoadOptions) if option_facts(each)}
    assert wanted <= {each.name for each in plan.command.params}
    daemon = {each.name for each in fields(PeerSettings) if option_facts(each)}
    assert daemon <= {each.name for each in peer.command.params}
    wanted |= {each.name for each in fields(GenerationOptions) if option_facts(each)}
    of_several = {"concurrency", "batch_invariant", "copies"}
    assert wanted - {each.name for each in run.command.params} == of_several
