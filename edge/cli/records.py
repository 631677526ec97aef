"""Records of a command: a table for people, or JSON for scripts.

`--json` prints plain values, with units in their names (`weight_bytes`, `unused_s`), and null for
what is not known. A command that lists things prints an array, an object for each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import click
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edge.errors import printable

Record = TypeVar("Record")

Columns = Mapping[str, Callable[[Record], str | None]]
"""By heading, the function from a record to its cell; None: not known."""

_LONGEST_CELL = 240
_WIDE = 240
_PADDING = 2
"""Characters of a column beside its cell: spaces and a line."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def print_json(value: object) -> None:
    """Print indented JSON."""
    click.echo(json.dumps(value, indent=2))


def make_table(
    records: Iterable[Record],
    columns: Columns[Record],
    *,
    title: str | None = None,
    right: Collection[str] = (),
) -> Table:
    """A table with a row for each record. Cells are plain text without control characters.

    right: headings of columns of numbers and sizes.
    """
    made = Table(
        title=None if title is None else escape(title), pad_edge=False, collapse_padding=True
    )
    for heading in columns:
        made.add_column(heading, justify="right" if heading in right else "left")
    for each in records:
        made.add_row(*(Text(_shown(cell(each))) for cell in columns.values()))
    return made


def by_place(*headings: str) -> Columns[Sequence[str]]:
    """Columns for records that are sequences of cells."""
    return {heading: itemgetter(place) for place, heading in enumerate(headings)}


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table. Outside of a terminal, each row is one line of any length."""
    console = Console() if console is None else console
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(table)


def columns_that_fit(
    records: Sequence[Record],
    columns: Columns[Record],
    width: int | None,
    *,
    least_wanted_last: Sequence[str],
) -> list[str]:
    """The headings of the columns that fit into `width`, in order; None: all.

    least_wanted_last: the columns that may be left out.
    """
    widths = {
        heading: max(map(cell_len, (heading, *(_shown(cell(each)) for each in records)))) + _PADDING
        for heading, cell in columns.items()
    }
    for heading in reversed(least_wanted_last):
        if width is None or sum(widths.values()) <= width:
            break
        del widths[heading]
    return list(widths)


def _shown(cell: str | None) -> str:
    return "–" if cell is None else printable(cell, _LONGEST_CELL)
