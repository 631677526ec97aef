"""A case of the benches: a question, options, and figures under their conditions.

A case is a function that yields what it found. `case` makes a command of it, which shows the
figures and, with --append, adds them to results.csv.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from edge.demos.bench import results
from edge.demos.bench.results import Metric
from edge.demos.shapes import SHAPES, checkpoint, described
from edge.host.cache_paths import cache_root
from edge.weights.formats import DTYPES

LOOPBACK = "TCP over loopback"

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class Given(SimpleNamespace):
    """The options of a case, as attributes; and what several cases make of them."""

    @property
    def path(self) -> Path:
        """The model: --file, or a checkpoint of --shape that is made if it is not there."""
        return getattr(self, "file", None) or checkpoint(self.shape, self.folder)

    @property
    def model(self) -> str:
        """In the words of results.csv."""
        file = getattr(self, "file", None)
        return file.name if file else described(self.shape)

    @property
    def arrangement(self) -> str:
        return f"{self.peers} x {self.threads} threads, {self.plan}"

    @property
    def context_tokens(self) -> int:
        return int(self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Figures of one variant of a case; the other fields are columns of results.csv."""

    figures: Iterable[Metric]
    variant: str
    model: str
    link: str = LOOPBACK
    question: str = ""
    """Where it is not the one of the case."""
    keep: bool = True
    """False for figures that say nothing, of a dry run."""
    bad: Sequence[str] = ()
    """What was not as promised: the command fails, once everything is told."""


def command(
    *options: Option, help: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function with these options and --append; without `help`, its docstring
    is that."""

    def declare(run: Callable[..., None]) -> click.Command:
        made = run
        for option in reversed((*options, APPEND)):
            made = option(made)
        return click.command(help=help)(made)

    return declare


def case(
    question: str, *options: Option
) -> Callable[[Callable[[Given], Iterator[Found]]], click.Command]:
    """Makes a command of a function, which is given these options as attributes."""

    def declare(run: Callable[[Given], Iterator[Found]]) -> click.Command:
        @command(*options, help=inspect.getdoc(run))
        def measure(append: bool, **given: Any) -> None:
            bad: list[str] = []
            for found in run(Given(**given)):
                click.echo(f"\n{found.model}: {found.variant}")
                rows = results.rows(
                    found.figures,
                    question=found.question or question,
                    variant=found.variant,
                    link=found.link,
                    model=found.model,
                )
                results.show(rows)
                if append and found.keep:
                    results.append(rows)
                bad += found.bad
            if bad:
                raise SystemExit(f"not as promised: {'; '.join(bad)}")

        return measure

    return declare


APPEND: Option = click.option("--append", is_flag=True, help="Add the rows to their CSV file.")

FOLDER: Option = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: cache_root() / "bench",
    show_default="bench, below the cache of Edge",
    help="Where checkpoints and caches are kept.",
)

FILE: Option = click.option(
    "--file",
    type=click.Path(exists=True, path_type=Path),
    help="A checkpoint or a GGUF file, instead of the shape.",
)

LLAMA_PYTHON: Option = click.option(
    "--llama-python", required=True, help="A Python with llama-cpp-python and gguf."
)


def number(name: str, default: int, help: str = "", *, least: int = 1) -> Option:
    return click.option(
        name, type=click.IntRange(least), default=default, show_default=True, help=help
    )


def choice(name: str, values: Iterable[str], default: str) -> Option:
    return click.option(name, type=click.Choice(list(values)), default=default, show_default=True)


def text(name: str, default: str, help: str = "") -> Option:
    return click.option(name, default=default, show_default=True, help=help)


def shape(default: str = "W") -> Option:
    """The name of one of SHAPES."""
    return choice("--shape", SHAPES, default)


def peers(count: int, threads: int, plan: str = "tensor") -> tuple[Option, ...]:
    """Local peers, and how a model is cut over them."""
    return (
        number("--peers", count),
        number("--threads", threads, "Of each."),
        text("--plan", plan, "auto, pipeline or tensor."),
    )


def dtype(default: str = "int4") -> Option:
    return choice("--dtype", DTYPES, default)


def block_size(default: int) -> Option:
    return number("--block-size", default, "Weights of a block of integers.")


def lengths(prompt: int, new: int) -> tuple[Option, ...]:
    return number("--prompt-tokens", prompt), number("--new-tokens", new, least=2)


def rounds(default: int) -> Option:
    return number("--rounds", default)
