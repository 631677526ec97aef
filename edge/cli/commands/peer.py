"""`edge peer`: the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edge.backends.registry import open_backend, usual_backend
from edge.cli.config_file import as_toml, config_option, read_config
from edge.cli.field_options import field_options, given_options
from edge.cli.logs import LogOptions, set_up_logging
from edge.cli.services.managers import MANAGERS
from edge.cli.services.service import Service, install_service, peer_task
from edge.errors import NetworkError, RequestError
from edge.host.addresses import has_network
from edge.host.blas_threads import limit_blas_threads
from edge.host.cuda_driver import num_cuda_devices, use_only
from edge.host.free_memory import format_size
from edge.host.gpu_adapters import allow_software_adapters
from edge.membership.identity import peer_id
from edge.membership.roles import LEND
from edge.membership.tls_credentials import TlsCredentials
from edge.peer.daemon import PeerDaemon
from edge.peer.resources import PeerResources
from edge.peer.rest import Rest
from edge.peer.settings import PeerSettings
from edge.protocol.heartbeat import LEAVES_WITHIN_S
from edge.system.descriptors import allow_descriptors
from edge.system.kind import usual_service_manager
from edge.system.signals import on_end_of_input, on_signal, run_in_loop
from edge.transport import Credentials, format_address, parse_address

if TYPE_CHECKING:
    from edge.membership.current import CurrentMembership
    from edge.membership.membership import Membership

_MOST_HANDED_BYTES = 64 << 10

LOOK_EVERY_S = 1.0
"""Seconds between checks for a new membership of this device."""

EXIT_TIMEOUT_S = 5.0
"""Seconds for a running step or load to finish when the daemon ends."""


@click.group(
    "peer",
    short_help="Run the daemon that lends this device to the cluster.",
    invoke_without_command=True,
)
@config_option
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the effective options as a file for --config, with the origin of each; start "
    "nothing.",
)
@field_options(PeerSettings)
@given_options("logs", LogOptions)
@click.option(
    "--gpu",
    type=click.IntRange(0, 1023),
    metavar="N",
    help="The GPU of this daemon, by nvidia-smi's number.  [default: the first]",
)
@click.option(
    "--no-announce", is_flag=True, help="Do not announce by zeroconf; others need the address."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="No keys and no encryption: anybody who reaches the port can use this device and read "
    "along. For benchmarks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when ready.")
@click.option("--handed-keys", is_flag=True, hidden=True, help="Read them from standard input.")
@click.option(
    "--supervised", is_flag=True, hidden=True, help="End when standard input ends; do not announce."
)
@click.pass_context
def command(
    context: click.Context,
    /,
    print_config: bool,
    logs: LogOptions,
    gpu: int | None,
    no_announce: bool,
    insecure: bool,
    handed_keys: bool,
    as_json: bool,
    supervised: bool,
    **named: Any,
) -> None:
    """Lend this device to a cluster until Ctrl-C.

    The daemon listens, announces itself by zeroconf and waits for a coordinator (`edge run`, or a
    Python program) to place a part of a model here. Received weights stay in a cache on disk.

    --memory limits the whole process. Python and ONNX Runtime take about 125 MiB of it, as the
    start says, and the buffers of a step are counted, too.

    On a GPU, --memory limits the GPU's memory. Layers that do not fit there are copied into it for
    each token (weight offload): from --host-memory as far as it goes, the rest from disk. Free
    --host-memory holds KV caches before they go to --kv-disk. CUDA takes some more GiB of the
    host's memory.

    \b
    Examples:
      edge peer                                     all interfaces, any port, all cores
      edge peer --name attic --threads 4 --memory 6GiB
      edge peer --listen 192.168.1.7:5000           a fixed address for networks without zeroconf
      edge peer --backend ort                       the CPU, also where there is a GPU
      edge peer --backend webgpu                    a GPU of any vendor
      edge peer --gpu 1                             the second GPU; --gpu 0 in a daemon of its own
      edge peer --config edge.toml --log-file /var/log/edge/peer.log --log-level info
      edge peer install                             at each start of the machine

    Each GPU of a host needs its own daemon. Daemons that share layers use NCCL for sums.

    Only members of this device's cluster can use it, with encryption: see `edge pair`.
    """
    if context.invoked_subcommand is not None:
        if _has_given(context):
            raise click.UsageError(
                "options of the daemon go into a file; write edge peer install --config FILE"
            )
        return
    if logs != LogOptions() and not print_config:
        set_up_logging(logs)
    given = {name: value for name, value in named.items() if value is not None}
    if gpu is not None:
        given = {"name": f"{socket.gethostname()}-gpu{gpu}", **given}
        given["backend"] = _only(gpu, given["backend"])
    settings = PeerSettings(**given, announce=not (no_announce or supervised))
    if print_config:
        for line in as_toml(context, {"name": settings.name, "threads": settings.threads}):
            click.echo(line)
        return
    if settings.allow_software_adapter:
        allow_software_adapters()
    backend = settings.backend
    if backend == "auto":
        backend, sentence = usual_backend(threads=settings.threads)
        if sentence:
            click.echo(f"edge: {sentence}", err=True)
    if settings.host_memory_bytes and backend != "triton":
        raise RequestError(
            f"back end {backend} uses the host's memory, which --memory limits",
            remedy="leave out --host-memory",
        )
    settings = replace(settings, backend=backend)
    if backend != "ort":  # an absent GPU is told now; ONNX Runtime can wait for the first model
        opened = open_backend(backend, threads=settings.threads)
        settings = replace(settings, processor=opened.device_name)
    allow_descriptors()
    serve = functools.partial(_serve, supervised=supervised, as_json=as_json or supervised)
    if insecure and settings.allow:
        raise RequestError(
            "--allow needs keys, and --insecure leaves them out; give one of the two"
        )
    is_watched = sys.stderr.isatty() and not (supervised or as_json)
    if is_watched and logs.log_level is None:
        logging.getLogger("edge.peer.audit").setLevel(logging.INFO)
    if insecure:
        click.echo(
            "edge: --insecure: anybody who reaches this port can use this device, and anyone on "
            "the network can read along",
            err=True,
        )
        run_in_loop(_until_ended(lambda ending: _serve_anybody(serve, settings, ending)))
    elif handed_keys:
        handed = TlsCredentials.from_bytes(sys.stdin.buffer.readline(_MOST_HANDED_BYTES))
        shown = handed.credentials_of_a_run()
        run_in_loop(_until_ended(lambda ending: serve(settings, shown, handed.id, ending)))
    else:
        # A daemon with handed keys does not need the modules that make and store them.
        from edge.membership.current import CurrentMembership
        from edge.membership.store import MembershipStore, config_root

        own, store = CurrentMembership(settings.name), MembershipStore(config_root())
        telling = store.telling if settings.announce else contextlib.nullcontext
        with store.numbered() as start:
            run_in_loop(
                _until_ended(
                    lambda ending: _serve_clusters(serve, settings, own, start, telling, ending)
                )
            )


@command.command()
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    metavar="FILE",
    help="The daemon's options, as for edge peer --config; the file is read at each start.",
)
@click.option(
    "--system",
    is_flag=True,
    help="For the whole system, at boot; root writes the file, the daemon runs as your user.",
)
@click.option("--print", "print_only", is_flag=True, help="Print the file and write nothing.")
@click.option(
    "--manager",
    type=click.Choice(list(MANAGERS)),
    default=usual_service_manager(),
    help="The program that starts services: systemd on Linux, launchd on macOS, task-scheduler on "
    "Windows; by default, this system's.",
)
@click.pass_context
def install(
    context: click.Context,
    /,
    config: Path | None,
    system: bool,
    print_only: bool,
    manager: str,
) -> None:
    """Write the file of a service that runs the daemon, and print the next commands.

    \b
    Examples:
      edge peer install                             while you are logged in, or linger
      edge peer install --config ~/edge.toml
      sudo edge peer install --system               at boot, as your user
      edge peer install --print
      edge peer install --print --manager launchd   what it would be on a Mac
    """
    if config is not None:
        assert context.parent is not None
        read_config(config, context.parent)
    service = Service.of_this_process(peer_task(config), is_system=system)
    if print_only:
        click.echo(MANAGERS[manager].text(service), nl=False)
        return
    for line in install_service(MANAGERS[manager], service):
        click.echo(line)


def _has_given(context: click.Context) -> bool:
    """Whether the command line has options."""
    return any(
        context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in context.params
    )


def _only(gpu: int, backend: str) -> str:
    """Hide all other GPUs from this process. Returns the back end. Raises RequestError."""
    if backend not in ("auto", "triton"):
        raise RequestError(
            f"--gpu names a GPU, and back end {backend} uses none",
            remedy="leave out one of the two",
        )
    use_only(gpu, os.environ)
    if not num_cuda_devices():
        raise RequestError(
            f"CUDA finds no GPU {gpu} here",
            remedy="nvidia-smi lists the GPUs, from 0",
        )
    return "triton"


_SAID_AFTER_S = 0.5
"""Seconds of a rest before it is told: the first look takes a moment."""


class _Ending:
    """The signals to end the daemon; a second one ends it at once."""

    def __init__(self) -> None:
        self.wished = asyncio.Event()
        self.at_once = asyncio.Event()

    def told(self) -> None:
        (self.at_once if self.wished.is_set() else self.wished).set()

    def at_once_told(self) -> None:
        """The supervisor and its models have gone."""
        self.at_once.set()
        self.wished.set()


async def _until_ended(serve: Callable[[_Ending], Awaitable[object]]) -> None:
    """Run `serve` until signals end it."""
    loop = asyncio.get_running_loop()
    ending = _Ending()
    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(loop, number, ending.told)
    await serve(ending)


async def _serve_clusters(
    serve: Callable[..., Awaitable[PeerSettings]],
    settings: PeerSettings,
    own: CurrentMembership,
    start: tuple[int, int],
    telling: Callable[[], contextlib.AbstractContextManager[None]],
    ending: _Ending,
) -> None:
    """Serve this device's cluster; start anew when the device joins another cluster, when the
    cluster's key is rotated, and after a rest.

    start: the daemon's number and epoch. telling: held while members are told of expulsions.
    """
    number, epoch = start
    rest, asked = Rest(settings), settings.listen
    while await _may_lend(rest, settings, ending):
        membership = own.current()
        if LEND not in membership.roles:
            raise RequestError(
                "this device has only the role use, and cannot compute for others; pair it again, "
                "with --role lend on the device that shows the code"
            )
        id = peer_id(membership.identity.id, number)
        moved = functools.partial(_moved, own, membership)
        again = functools.partial(serve, epoch=epoch, moved=moved, rest=rest)
        with telling():
            settings = await _serve_at(asked, again, settings, own.credentials(), id, ending)
        epoch += 1  # others take what comes again with the same epoch for what left


async def _serve_anybody(
    serve: Callable[..., Awaitable[PeerSettings]], settings: PeerSettings, ending: _Ending
) -> None:
    """Serve without keys, with rests."""
    rest, asked = Rest(settings), settings.listen
    while await _may_lend(rest, settings, ending):
        again = functools.partial(serve, rest=rest)
        settings = await _serve_at(asked, again, settings, None, None, ending)


async def _serve_at(
    asked: str,
    serve: Callable[..., Awaitable[PeerSettings]],
    settings: PeerSettings,
    shown: Credentials | None,
    id: str | None,
    ending: _Ending,
) -> PeerSettings:
    """Serve at the port of the last time. Another program may have taken it during a rest: then at
    the address that the user asked for."""
    try:
        return await serve(settings, shown, id, ending)
    except NetworkError:
        if settings.listen == asked:
            raise
        return await serve(replace(settings, listen=asked), shown, id, ending)


async def _may_lend(rest: Rest, settings: PeerSettings, ending: _Ending) -> bool:
    """Wait until the device lends. Returns False if the daemon ends before."""
    lends, ends = asyncio.ensure_future(rest.ends()), asyncio.ensure_future(ending.wished.wait())
    try:
        first, done = asyncio.FIRST_COMPLETED, set[asyncio.Future[Any]]()
        while not done:
            done, _ = await asyncio.wait((lends, ends), timeout=_SAID_AFTER_S, return_when=first)
            if rest.reason is not None:
                break
        if not done:
            click.echo(f"peer {settings.name} lends nothing for now: {rest.reason}", err=True)
            await asyncio.wait((lends, ends), return_when=first)
        if lends.done():
            lends.result()
        return not ending.wished.is_set()
    finally:
        for each in (lends, ends):
            each.cancel()
        await asyncio.gather(lends, ends, return_exceptions=True)


async def _moved(own: CurrentMembership, membership: Membership) -> None:
    """Returns once this device has another certificate."""
    shown = membership.certificate
    while own.current().certificate == shown:  # noqa: ASYNC110  another process changes it
        await asyncio.sleep(LOOK_EVERY_S)


async def _serve(
    settings: PeerSettings,
    shown: Credentials | None,
    id: str | None,
    ending: _Ending,
    *,
    epoch: int | None = None,
    moved: Callable[[], Coroutine[None, None, None]] | None = None,
    rest: Rest | None = None,
    supervised: bool = False,
    as_json: bool,
) -> PeerSettings:
    """Run one daemon until a signal, the end of its supervisor, the return of `moved`, or a rest.

    Returns settings with which the next daemon listens on the same port.
    """
    loop = asyncio.get_running_loop()
    limit_blas_threads(settings.threads)
    daemon, goes_on = PeerDaemon(settings, shown, id, epoch), False
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(ending.wished.wait())]
    try:
        await daemon.start()
        _say_ready(daemon.resources, as_json=as_json)
        if supervised:
            on_end_of_input(loop, ending.at_once_told)
        if moved is not None:
            waits.append(asyncio.ensure_future(moved()))
        if rest is not None:
            waits.append(asyncio.ensure_future(rest.begins()))
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        if ending.wished.is_set() or (rest is not None and rest.reason is not None):
            await _leave(daemon, ending, as_json=as_json)
        host, _ = parse_address(settings.listen)
        _, port = parse_address(daemon.resources.listens_at[0])
        goes_on = True
        return replace(settings, listen=format_address(host, port))
    finally:
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        closing = asyncio.create_task(daemon.aclose())
        if goes_on:  # a signal ends a long wait for a compute kernel
            ends = asyncio.ensure_future(ending.wished.wait())
            await asyncio.wait([closing, ends], return_when=asyncio.FIRST_COMPLETED)
            ends.cancel()
        await asyncio.wait([closing], timeout=EXIT_TIMEOUT_S)
        if not closing.done():
            # A compute kernel cannot be interrupted, and the user wants the device back. Files are
            # safe at any moment; the system frees the rest.
            sys.stdout.flush()
            os._exit(0)


async def _leave(daemon: PeerDaemon, ending: _Ending, *, as_json: bool) -> None:
    """Wait until no model is loaded here, or until a second signal."""
    if daemon.resources.sessions and not as_json:
        more = " Ctrl-C again ends it at once." if ending.wished.is_set() else ""
        click.echo(
            f"peer {daemon.resources.settings.name} leaves: it tells the users of its models.{more}"
        )
    waits = [
        asyncio.ensure_future(daemon.leave(within_s=LEAVES_WITHIN_S)),
        asyncio.ensure_future(ending.at_once.wait()),
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def _say_ready(peer: PeerResources, *, as_json: bool) -> None:
    settings, ledger = peer.settings, peer.ledger
    if settings.memory_bytes is not None and settings.memory_bytes > ledger.budget_bytes:
        click.echo(
            f"edge: the control group of this process leaves {format_size(ledger.budget_bytes)} "
            f"of the {format_size(settings.memory_bytes)} that were asked for",
            err=True,
        )
    if as_json:
        click.echo(json.dumps({"name": settings.name, "addresses": peer.addresses}))
    else:
        where = f"cluster {settings.cluster}" if settings.announce else "not announced"
        if settings.announce and not has_network():
            where = "not announced, as this device is in no network: others name it by --peer"
        click.echo(
            f"peer {settings.name} listens on {', '.join(peer.addresses)} ({where}), "
            f"{settings.backend} on {settings.processor}, {settings.threads} threads, "
            f"{format_size(ledger.budget_bytes)} of memory, of which "
            f"{format_size(ledger.baseline.total)} are for the process itself. "
            "Ctrl-C ends it."
        )
        if settings.backend == "triton" and num_cuda_devices() > 1:
            click.echo(
                f"It uses the first of {num_cuda_devices()} GPUs; start one with --gpu N for each."
            )
    sys.stdout.flush()
