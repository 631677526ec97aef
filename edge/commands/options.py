"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from edge.api import Cluster
from edge.errors import PlanError, RequestError
from edge.formats import ACCURACIES
from partition import Plan
from partition import PlanError as PartitionPlanError

F = TypeVar("F", bound=Callable[..., Any])


def cluster_options(function: F) -> F:
    """Which peers to use: discovered, given, or started here."""
    for option in (
        click.option(
            "--interface",
            "interfaces",
            multiple=True,
            metavar="NAME|IP",
            help="Look for peers only on this network interface.",
        ),
        click.option(
            "--cluster",
            default="default",
            show_default=True,
            help="Name of the cluster to look for.",
        ),
        click.option(
            "--threads", type=click.IntRange(1, 1024), help="Threads of each --local peer."
        ),
        click.option("--memory", metavar="SIZE", help="Memory of each --local peer, as 2GiB."),
        click.option(
            "--local",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Start N peers on this machine for this command.",
        ),
        click.option(
            "--peer",
            "addresses",
            multiple=True,
            metavar="HOST:PORT",
            help="A peer by address instead of zeroconf; may be repeated.",
        ),
    ):
        function = option(function)
    return function


def model_options(function: F) -> F:
    """How the model is to be loaded."""
    for option in (
        click.option(
            "--context",
            type=click.IntRange(1),
            metavar="TOKENS",
            help=("Longest prompt and answer together.  [default: 4096, or the model's]"),
        ),
        click.option(
            "--accuracy",
            type=click.Choice(ACCURACIES),
            default="fast",
            show_default=True,
            help=(
                "fast rounds the inputs of int4 and int8 products to 8 bits; high adds what that "
                "leaves over, in up to twice the time."
            ),
        ),
        click.option(
            "--block-size",
            type=click.Choice(["16", "32", "64", "128"]),
            default="32",
            show_default=True,
            help="Weights that share a scale in int4 and int8.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "int8", "int4"]),
            default="int4",
            show_default=True,
            help="What weights are held in.",
        ),
        click.option(
            "--plan",
            "plan_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A plan by hand, as JSON (edge plan MODEL --json writes one).",
        ),
        click.option(
            "--parallel",
            type=click.Choice(["auto", "pipeline", "tensor"]),
            default="auto",
            show_default=True,
            help=(
                "auto: one peer if the model fits, else as few as needed; the "
                "others use every peer."
            ),
        ),
        click.argument("model", type=click.Path(path_type=Path)),
    ):
        function = option(function)
    return function


@contextmanager
def open_cluster(
    *,
    addresses: tuple[str, ...],
    local: int | None,
    memory: str | None,
    threads: int | None,
    cluster: str,
    interfaces: tuple[str, ...],
) -> Iterator[Cluster]:
    """The cluster that the options name."""
    if local is not None and addresses:
        raise click.UsageError("give either --local or --peer, not both")
    if local is None and (memory or threads):
        raise click.UsageError(
            "--memory and --threads are for --local peers; others have their own"
        )
    if local is not None:
        opened = Cluster.local(local, memory=memory, threads=threads)
    elif addresses:
        opened = Cluster.connect(addresses)
    else:
        opened = Cluster.discover(cluster, interfaces=interfaces or None)
    with opened:
        yield opened


def read_plan(plan_file: Path | None, parallel: str) -> Any:
    """The plan in the file, else the kind of plan. Raises PlanError for a file that is no plan."""
    if plan_file is None:
        return parallel
    if parallel != "auto":
        raise click.UsageError("give either --plan or --parallel, not both")
    try:
        value = json.loads(plan_file.read_text(encoding="utf-8"))
        # What `edge plan --json` prints holds the plan beside other things.
        return Plan.from_json(
            value["plan"] if isinstance(value, dict) and "plan" in value else value
        )
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{plan_file} cannot be read as JSON: {error}") from error
    except PartitionPlanError as error:
        raise PlanError(f"{plan_file}: {error}", error.problems) from error
