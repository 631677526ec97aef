"""`edge peers`: the peers of a cluster."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import AsyncGenerator, Sequence

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edge.api.watching import PeerChange, changes, watched_peers
from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import Columns, columns_that_fit, json_option, make_table, print_json
from edge.cli.sentences import print_sentence
from edge.host.free_memory import format_size
from edge.planning.shared_memory import sharing
from edge.protocol.description import HostedModel
from edge.protocol.peer_info import PeerInfo
from edge.system.signals import run_in_loop


def _device(peer: PeerInfo) -> str:
    return f"{peer.backend} on {peer.processor}, {peer.threads} threads"


def _free(peer: PeerInfo) -> str:
    return f"{format_size(peer.model_free_now_bytes)} of {format_size(peer.memory_bytes)}"


def _loaded(peer: PeerInfo) -> str | None:
    return ", ".join(f"{model.name} {model.dtype}" for model in peer.models) or None


def _in_host_memory(peer: PeerInfo) -> str | None:
    if peer.host_memory_bytes is None:
        return None
    return format_size(sum(model.host_bytes + model.kv_host_bytes for model in peer.models))


COLUMNS: Columns[PeerInfo] = {
    "name": lambda peer: peer.name,
    "address": lambda peer: peer.address,
    "health": lambda peer: peer.health,
    "device": _device,
    "free memory": _free,
    "loaded": _loaded,
    "weights": lambda peer: format_size(sum(m.bytes - m.kv_bytes for m in peer.models)),
    "in host memory": _in_host_memory,
    "KV in memory": lambda peer: format_size(
        sum(model.kv_bytes for model in peer.models) + peer.kv_beginnings_bytes
    ),
    "KV on disk": lambda peer: format_size(
        sum(model.kv_disk_bytes for model in peer.models) + peer.kv_prefix_bytes
    ),
}

_RIGHT = ("free memory", "weights", "in host memory", "KV in memory", "KV on disk")

_UNLIMITED = 10_000

LEAST_WANTED_LAST = (
    *("free memory", "loaded", "health", "device", "weights", "KV in memory", "KV on disk"),
    "in host memory",
)
"""Columns that may be left out: all but name and address."""


@click.command("peers", short_help="Show the peers of a cluster.")
@given_options("wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure"))
@click.option("--wide", is_flag=True, help="Show all columns, however wide the terminal is.")
@click.option(
    "--watch",
    is_flag=True,
    help="Go on until Ctrl-C: a table that follows on a terminal, else a line for each change.",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch asks each peer.",
)
@json_option
def command(wanted: ClusterOptions, wide: bool, watch: bool, every_s: float, as_json: bool) -> None:
    """Show name, address, device, free memory and loaded models of every peer that answers.

    A peer is alive, busy (it computes, loads or is measured at this moment), slow by 2.1 (its
    compute for a token takes 2.1 times as long as predicted) or leaving (its user has stopped it).
    A peer that does not answer is not listed. With --watch, a peer that answered before is silent,
    and lost after 20 s of silence.

    The last columns are the memory for weights and for KV caches, the part of both that a GPU
    offloads to host memory, and the KV caches on disk (see `edge peer --kv-disk`), of requests
    under way and of prefix caches. Prefix caches in memory are evicted when it is needed, and count
    as free. A narrow terminal shows fewer columns.

    \b
    Examples:
      edge peers                              all that zeroconf finds within seconds
      edge peers --cluster attic --json       for scripts
      edge peers --peer 192.168.1.7:5000      one that zeroconf does not reach
      edge peers --watch                      joins, losses and loads, until Ctrl-C
      edge peers --watch --json               a line of JSON for each change, for scripts
    """
    if watch:
        looks = watched_peers(
            wanted.addresses,
            cluster=wanted.cluster,
            interfaces=wanted.interfaces or None,
            insecure=wanted.insecure,
            every_s=every_s,
        )
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
            run_in_loop(_watch(looks, wide=wide, as_json=as_json))
        return
    with open_cluster(wanted) as found:
        peers = found.peers
    if as_json:
        print_json([peer.to_json() for peer in peers])
        return
    console = Console()
    show_peers(console, peers, width=console.width if console.is_terminal and not wide else None)


def show_peers(console: Console, peers: Sequence[PeerInfo], *, width: int | None) -> None:
    """Print the columns that fit into `width` (None: all), then each peer's models in words."""
    table, lines = _table_and_lines(peers, width)
    if width is None:
        unlimited = console.options.update(width=_UNLIMITED)
        console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)
    for line in lines:
        print_sentence(console, line)


async def _watch(looks: AsyncGenerator[tuple[PeerInfo, ...]], *, wide: bool, as_json: bool) -> None:
    console = Console()
    before: tuple[PeerInfo, ...] = ()
    async with contextlib.aclosing(looks):
        if console.is_terminal and not console.is_dumb_terminal and not as_json:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for peers in looks:
                    live.update(_screen(peers, None if wide else console.width), refresh=True)
            return
        async for peers in looks:
            for change in changes(before, peers):
                click.echo(_json_line(change) if as_json else change_in_words(change))
            before = peers


def _screen(peers: Sequence[PeerInfo], width: int | None) -> Group:
    table, lines = _table_and_lines(peers, width)
    lines.append(f"{len(peers)} peers at {datetime.datetime.now():%H:%M:%S}; Ctrl-C ends.")
    return Group(table, *map(Text, lines))


def _json_line(change: PeerChange) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": now, "event": change.event, "peer": change.peer.to_json()})


def change_in_words(change: PeerChange) -> str:
    """A change of a peer in one line."""
    peer, before = change.peer, change.before
    if change.event == "gone":
        return f"{peer.name} is gone"
    if before is None:
        return f"{peer.name} is there: {peer.address}, {_device(peer)}, {_offers(peer)}"
    if peer.silent_s is not None:
        return f"{peer.name} is {peer.health}: it may hang, or be cut off"
    told = [] if before.silent_s is None else ["answers again"]
    was, now = ([f"{m.name} {m.dtype}" for m in each.models] for each in (before, peer))
    told += [f"runs {each}" for each in now if each not in was]
    told += [f"no longer runs {each}" for each in was if each not in now]
    if peer.is_slow != before.is_slow and now:
        told.append(f"is {peer.health}" if peer.is_slow else "is no longer slow")
    return f"{peer.name} {', '.join(told) or 'changes'}: {_offers(peer)}"


def _offers(peer: PeerInfo) -> str:
    return f"{_free(peer)} free, runs {_loaded(peer) or '–'}"


def _table_and_lines(peers: Sequence[PeerInfo], width: int | None) -> tuple[Table, list[str]]:
    shown = columns_that_fit(peers, COLUMNS, width, least_wanted_last=LEAST_WANTED_LAST)
    table = make_table(peers, {each: COLUMNS[each] for each in shown}, right=_RIGHT)
    left_out = [each for each in COLUMNS if each not in shown]
    lines = [_in_words(peer, model) for peer in peers for model in peer.models]
    lines += [
        f"{', '.join(peer.name for peer in members)} share the memory of one machine, and "
        f"{format_size(free_bytes)} of it are free for all of them."
        for members, free_bytes in sharing(peers)
        if sum(peer.free_now_bytes for peer in members) > free_bytes
    ]
    if left_out:
        lines.append(f"No room for {', '.join(left_out)}: --wide shows all.")
    return table, lines


def _in_words(peer: PeerInfo, model: HostedModel) -> str:
    streamed = (
        f", {format_size(model.streamed_bytes)} from disk for each token"
        if model.streamed_bytes
        else ""
    )
    return (
        f"{peer.name} runs {model.name} {model.dtype} for {model.user}, stage {model.stage}, rank "
        f"{model.rank}: {format_size(model.bytes)} and "
        f"{format_size(model.buffer_bytes)} for steps{streamed}"
    )
