"""Options that scripts share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edge.demos.shapes import SHAPES
from edge.host.cache_paths import cache_root

F = TypeVar("F", bound=Callable[..., Any])


def shape_option(default: str = "W") -> Callable[[F], F]:
    """Gives the command `shape`, the name of one of SHAPES."""
    return click.option(
        "--shape", type=click.Choice(list(SHAPES)), default=default, show_default=True
    )


def folder_option(function: F) -> F:
    """Gives the command `folder`, a Path that may not be there yet."""
    return click.option(
        "--folder",
        type=click.Path(path_type=Path, file_okay=False),
        default=lambda: cache_root() / "bench",
        show_default="bench, below the cache of Edge",
        help="Where checkpoints and caches are kept.",
    )(function)


def append_option(function: F) -> F:
    """Gives the command `append`, for `results.publish`."""
    return click.option("--append", is_flag=True, help="Add the figures to results.csv.")(function)
