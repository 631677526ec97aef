"""`edge peers`: who is there."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncGenerator, Mapping, Sequence

import click
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edge.api.watching import PeerChange, changes, watched_peers
from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.sentences import print_sentence
from edge.host.free_memory import format_size
from edge.protocol.description import HostedModel
from edge.protocol.peer_info import PeerInfo

COLUMNS = (
    *("name", "address", "health", "device", "free memory", "loaded"),
    *("weights", "in host memory", "KV in memory", "KV on disk"),
)

LEAST_WANTED_LAST = (
    *("free memory", "loaded", "health", "device", "weights", "KV in memory", "KV on disk"),
    "in host memory",
)
"""Columns that may be left out; a peer without its name and address could not be spoken of."""


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(wanted: ClusterOptions, wide: bool, watch: bool, every_s: float, as_json: bool) -> None:
    """Name, address, device, free memory and loaded models of every peer that answers.

    A peer is alive, busy (it computes, loads or is measured at this moment), slow by 2.1 (what it
    computes for a token takes 2.1 times as long as predicted) or leaving (its user has stopped it).
    One that does not answer is not listed. With --watch, one that did before is silent, and lost
    after 20 s of silence.

    The last columns say what of its memory is kept for weights and for keys and values (KV), what a
    GPU's host holds of either that the GPU has no room for, and what of keys and values is on disk
    now (see `edge peer --kv-disk`): of requests under way, and of earlier prompts' beginnings.
    Those are in memory, too, as long as nothing else needs it; what they take counts as free. A
    narrow terminal shows fewer columns.

    \b
    Examples:
      edge peers                              all that zeroconf finds within seconds
      edge peers --cluster attic --json       for scripts
      edge peers --peer 192.168.1.7:5000      one that zeroconf does not reach
      edge peers --watch                      who comes, goes and loads what, until Ctrl-C
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
        with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
            asyncio.run(_watch(looks, wide=wide, as_json=as_json))
        return
    with open_cluster(wanted) as found:
        peers = found.peers
    if as_json:
        click.echo(json.dumps([peer.to_json() for peer in peers], indent=2))
        return
    console = Console()
    # A file, or another program, gets everything in one line for each peer.
    show_peers(console, peers, width=console.width if console.is_terminal and not wide else None)


def show_peers(console: Console, peers: Sequence[PeerInfo], *, width: int | None) -> None:
    """As many columns as fit into `width`, or all; then what each peer runs, in words."""
    if width is None:
        console.width = max(console.width, _table_width([_cells(peer) for peer in peers], COLUMNS))
    table, lines = _table_and_lines(peers, width)
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
    """One line, with what is new."""
    peer, before = change.peer, change.before
    if change.event == "gone":
        return f"{peer.name} is gone"
    if before is None:
        cells = _cells(peer)
        return f"{peer.name} is there: {cells['address']}, {cells['device']}, " + _offers(peer)
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
    return f"{_cells(peer)['free memory']} free, runs {_cells(peer)['loaded']}"


def _table_and_lines(peers: Sequence[PeerInfo], width: int | None) -> tuple[Table, list[str]]:
    rows = [_cells(peer) for peer in peers]
    shown, left_out = columns_that_fit(rows, width)
    table = Table(*shown)
    for row in rows:
        table.add_row(*(escape(row[column]) for column in shown))
    lines = [_in_words(peer, model) for peer in peers for model in peer.models]
    if left_out:
        lines.append(f"No room for {', '.join(left_out)}: --wide shows all.")
    return table, lines


def columns_that_fit(
    rows: Sequence[Mapping[str, str]], width: int | None
) -> tuple[list[str], list[str]]:
    """(shown, left out), each in order; None is any width."""
    shown = list(COLUMNS)
    for column in reversed(LEAST_WANTED_LAST):
        if width is None or _table_width(rows, shown) <= width:
            break
        shown.remove(column)
    return shown, [column for column in COLUMNS if column not in shown]


def _table_width(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> int:
    """In letters, each column as wide as what is widest in it, with its borders."""
    widths = [max(cell_len(text) for text in (each, *(r[each] for r in rows))) for each in columns]
    return sum(width + 3 for width in widths) + 1


def _cells(peer: PeerInfo) -> dict[str, str]:
    kv_bytes = sum(model.kv_bytes for model in peer.models) + peer.kv_beginnings_bytes
    kv_disk_bytes = sum(model.kv_disk_bytes for model in peer.models) + peer.kv_prefix_bytes
    return {
        "name": peer.name,
        "address": peer.address,
        "health": peer.health,
        "device": f"{peer.backend} on {peer.processor}, {peer.threads} threads",
        "free memory": f"{format_size(peer.model_free_bytes)} of {format_size(peer.memory_bytes)}",
        "loaded": ", ".join(f"{model.name} {model.dtype}" for model in peer.models) or "–",
        "weights": format_size(sum(m.bytes - m.kv_bytes for m in peer.models)),
        "in host memory": "–"
        if peer.host_memory_bytes is None
        else format_size(sum(m.host_bytes + m.kv_host_bytes for m in peer.models)),
        "KV in memory": format_size(kv_bytes),
        "KV on disk": format_size(kv_disk_bytes),
    }


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
