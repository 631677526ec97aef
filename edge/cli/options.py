"""Options that several commands share: of the cluster, of a load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import click

from edge.answers.terms import GenerationOptions
from edge.api.cluster import Cluster
from edge.api.hub_download import check_model
from edge.cli.field_options import given_options
from edge.errors import PlanError, RequestError
from edge.host.cgroup import usable_cores
from edge.host.cuda_driver import num_cuda_devices
from edge.offload import parse_json, read_file
from edge.option_fields import option
from edge.partition import Parallel, Plan
from edge.partition import PlanError as PartitionPlanError
from edge.planning.load_options import LoadOptions

_MAX_PLAN_BYTES = 4 << 20

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The peers to use: discovered, given, or started here."""

    addresses: tuple[str, ...] = option(
        (),
        flags=("--peer",),
        metavar="HOST:PORT",
        help="A peer by address instead of zeroconf; may be repeated.",
    )
    local: int | None = option(
        None,
        at_least=1,
        at_most=64,
        metavar="N",
        help="Start N peers on this machine for this command. run, chat and serve start one with "
        "all threads instead, unless --parallel, --plan, --copies or --standby kv asks for "
        "several, --draft for one beside it, or --threads or a memory for their size.",
    )
    memory: str | None = option(
        None, metavar="SIZE", help="Memory of each --local peer's whole process, such as 2GiB."
    )
    model_memory: str | None = option(
        None,
        metavar="SIZE",
        help="The part of each --local peer's memory for weights and KV caches.",
    )
    threads: int | None = option(
        None, at_least=1, at_most=1024, help="Threads of each --local peer."
    )
    cluster: str = option("default", help="Name of the cluster to look for.")
    interfaces: tuple[str, ...] = option(
        (),
        flags=("--interface",),
        metavar="NAME|IP",
        help="Look for peers only on this network interface.",
    )
    insecure: bool = option(
        False,
        help="For peers that run with --insecure: no keys, and anyone on the network can read "
        "along.",
    )


cluster_options = given_options("peers", ClusterOptions)

generation_options = given_options("generation", GenerationOptions)


def model_options(
    *,
    concurrency: bool = False,
    only: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    needs_model: bool = True,
) -> Callable[[F], F]:
    """Give a command `model`, a path, and `options`, the LoadOptions of the command line.

    only: these of its fields, in addition to the plan; empty: all of them. defaults: this command's
    own, by field. needs_model: False: an omitted model is None.
    """
    left_out = () if concurrency else ("concurrency", "batch_invariant", "copies")

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(
            *, plan_file: Path | None, parallel: Parallel, options: LoadOptions, **others: Any
        ) -> Any:
            options = replace(options, plan=read_plan(plan_file, parallel))
            return function(options=options, **others)

        for add in (
            given_options(
                "options", LoadOptions, only=only, leave_out=left_out, defaults=defaults or {}
            ),
            click.option(
                "--plan",
                "plan_file",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="A plan by hand, as JSON (edge plan MODEL --json writes one).",
            ),
            click.option(
                "--parallel",
                type=click.Choice(get_args(Parallel)),
                default="auto",
                show_default=True,
                help="auto: the plan with the least predicted time: one peer, some or all. "
                "pipeline (whole layers each) and tensor (a part of every layer each) use every "
                "peer.",
            ),
            click.argument("model", type=click.Path(path_type=str), required=needs_model),
        ):
            command = add(command)
        return command  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningCall:
    """The class method of Cluster or AsyncCluster to call, and its arguments."""

    verb: Literal["local", "connect", "discover"]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


def way_to(options: ClusterOptions, load: LoadOptions | None = None) -> OpeningCall:
    """The call that opens the cluster of the options.

    With a manual plan in `load`, the search waits for as many peers as it has devices.
    """
    if options.local is not None and options.addresses:
        raise click.UsageError(
            "--local and --peer exclude each other; give either --local or --peer"
        )
    if options.local is None and (options.memory or options.model_memory or options.threads):
        raise click.UsageError(
            "--memory, --model-memory and --threads are for --local peers only; add --local N, or "
            "leave them out"
        )
    named: dict[str, Any] = {"insecure": options.insecure}
    if options.local is not None:
        named |= {name: getattr(options, name) for name in ("memory", "model_memory", "threads")}
        return OpeningCall(verb="local", arguments=(options.local,), named=named)
    if options.addresses:
        return OpeningCall(verb="connect", arguments=(options.addresses,), named=named)
    named["interfaces"] = options.interfaces or None
    if load is not None and isinstance(load.plan, Plan):
        named["at_least"] = len(set(load.plan.devices))
    return OpeningCall(verb="discover", arguments=(options.cluster,), named=named)


def preferring_one(options: ClusterOptions, load: LoadOptions) -> ClusterOptions:
    """The options with one local peer of all threads in place of several, and a sentence on it.

    As they are where several were asked for in another way than by their number, and where this
    machine has several GPUs.
    """
    count = options.local or 1
    sized = options.memory or options.model_memory or options.threads
    several = load.plan != "auto" or load.wants_copies or load.draft is not None
    several |= load.standby == "kv"
    if count == 1 or sized or several or num_cuda_devices() > 1:
        return options
    cores = usable_cores()
    click.echo(
        f"--local {count} would divide this machine's {cores} core{'s' if cores > 1 else ''} and "
        "its memory, and every token would pass between the peers; one peer with all threads "
        f"answers instead. For {count} peers, give --parallel pipeline or tensor.",
        err=True,
    )
    return replace(options, local=1)


@contextmanager
def open_cluster(
    options: ClusterOptions,
    load: LoadOptions | None = None,
    *,
    model: str | None = None,
    timeout_s: float | None = None,
) -> Iterator[Cluster]:
    """The cluster of the options; see `way_to`. model: checked first; raises the errors of
    `check_model` before peers are searched or started. timeout_s: of a search by zeroconf; None:
    the default."""
    way = way_to(options, load)
    if timeout_s is not None and way.verb == "discover":
        way = replace(way, named={**way.named, "timeout_s": timeout_s})
    if model is not None:
        check_model(model)
    with getattr(Cluster, way.verb)(*way.arguments, **way.named) as cluster:
        yield cluster


def read_plan(plan_file: Path | None, parallel: Parallel) -> Parallel | Plan:
    """The plan in the file, else the kind of plan. Raises PlanError for a file that is no plan."""
    if plan_file is None:
        return parallel
    if parallel != "auto":
        raise click.UsageError(
            "--plan and --parallel exclude each other; give either --plan or --parallel"
        )
    try:
        value = parse_json(read_file(plan_file, _MAX_PLAN_BYTES))
        # `edge plan --json` prints the plan with other things.
        return Plan.from_json(
            value["plan"] if isinstance(value, dict) and "plan" in value else value
        )
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{plan_file} cannot be read as JSON: {error}",
            remedy="edge plan MODEL --json writes one",
        ) from error
    except PartitionPlanError as error:
        raise PlanError(
            f"{plan_file}: {str(error).rstrip('.')}",
            error.problems,
            remedy="edge plan MODEL --json writes one that can run",
        ) from error
