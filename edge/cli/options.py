"""Options that several commands share, and what they mean."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from edge.api.cluster import Cluster
from edge.errors import PlanError, RequestError
from edge.planning.load_options import LoadOptions
from edge.protocol.wire_rules import WIRES
from edge.weights.formats import ACCURACIES, KV_DTYPES
from partition import Parallel, Plan
from partition import PlanError as PartitionPlanError

F = TypeVar("F", bound=Callable[..., Any])


address_option = click.option(
    "--peer",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="A peer by address instead of zeroconf; may be repeated.",
)

cluster_option = click.option(
    "--cluster", default="default", show_default=True, help="Name of the cluster to look for."
)

interface_option = click.option(
    "--interface",
    "interfaces",
    multiple=True,
    metavar="NAME|IP",
    help="Look for peers only on this network interface.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which peers to use: discovered, given, or started here."""

    addresses: tuple[str, ...]
    local: int | None = None
    memory: str | None = None
    model_memory: str | None = None
    threads: int | None = None
    cluster: str = "default"
    interfaces: tuple[str, ...] = ()


def cluster_options(function: F) -> F:
    """Give the command `peers`, its ClusterOptions."""

    @functools.wraps(function)
    def command(
        *,
        addresses: tuple[str, ...],
        local: int | None,
        memory: str | None,
        model_memory: str | None,
        threads: int | None,
        cluster: str,
        interfaces: tuple[str, ...],
        **others: Any,
    ) -> Any:
        peers = ClusterOptions(
            addresses=addresses,
            local=local,
            memory=memory,
            model_memory=model_memory,
            threads=threads,
            cluster=cluster,
            interfaces=interfaces,
        )
        return function(peers=peers, **others)

    for option in (
        interface_option,
        cluster_option,
        click.option(
            "--threads", type=click.IntRange(1, 1024), help="Threads of each --local peer."
        ),
        click.option(
            "--model-memory",
            metavar="SIZE",
            help="Of the memory of each --local peer, the most for weights and KV caches.",
        ),
        click.option(
            "--memory",
            metavar="SIZE",
            help="Memory of each --local peer, as 2GiB: of its whole process.",
        ),
        click.option(
            "--local",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Start N peers on this machine for this command.",
        ),
        address_option,
    ):
        command = option(command)
    return command  # type: ignore[return-value]


def model_options(function: F) -> F:
    """Give the command `model`, a path, and `options`: LoadOptions of the options named so."""
    names = {field.name for field in fields(LoadOptions)}

    @functools.wraps(function)
    def command(
        *, plan_file: Path | None, parallel: Parallel, block_size: str, **others: Any
    ) -> Any:
        named = {name: others.pop(name) for name in names & others.keys()}
        options = LoadOptions(
            plan=_read_plan(plan_file, parallel), block_size=int(block_size), **named
        )
        return function(options=options, **others)

    for option in (
        click.option(
            "--context",
            "context_tokens",
            type=click.IntRange(1),
            metavar="TOKENS",
            help=("Longest prompt and answer together.  [default: 4096, or the model's]"),
        ),
        click.option(
            "--stream",
            is_flag=True,
            help=(
                "If the model does not fit: keep on disk what does not, and read it for each "
                "token. As fast as the disk."
            ),
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="float32",
            show_default=True,
            help="What keys and values are kept in; int8 and int4 take a quarter and an eighth. "
            "With another --context they are rounded slightly differently.",
        ),
        click.option(
            "--wire",
            type=click.Choice(WIRES),
            default="float32",
            show_default=True,
            help=(
                "What activations travel in between peers. float16 and int8 send a half and under "
                "a third of the bytes and change results; auto rounds where that saves time."
            ),
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
        command = option(command)
    return command  # type: ignore[return-value]


@contextmanager
def open_cluster(options: ClusterOptions) -> Iterator[Cluster]:
    """The cluster that the options name."""
    if options.local is not None and options.addresses:
        raise click.UsageError("give either --local or --peer, not both")
    if options.local is None and (options.memory or options.model_memory or options.threads):
        raise click.UsageError(
            "--memory, --model-memory and --threads are for --local peers; others have their own"
        )
    if options.local is not None:
        opened = Cluster.local(
            options.local,
            memory=options.memory,
            model_memory=options.model_memory,
            threads=options.threads,
        )
    elif options.addresses:
        opened = Cluster.connect(options.addresses)
    else:
        opened = Cluster.discover(options.cluster, interfaces=options.interfaces or None)
    with opened:
        yield opened


def _read_plan(plan_file: Path | None, parallel: Parallel) -> Parallel | Plan:
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
        problems = " ".join(error.problems)
        raise PlanError(f"{plan_file}: {problems}", error.problems) from error
