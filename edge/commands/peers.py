"""`edge peers`: who is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge.commands.options import (
    ClusterOptions,
    address_option,
    cluster_option,
    interface_option,
    open_cluster,
)
from edge.memory import format_size
from edge.peer_info import PeerInfo

COLUMNS = (
    *("name", "address", "device", "free memory", "loaded"),
    *("weights", "in host memory", "KV in memory", "KV on disk"),
)

LEAST_WANTED_LAST = (
    *("free memory", "loaded", "device", "weights", "KV in memory", "KV on disk"),
    "in host memory",
)
"""Columns that may be left out; a peer without its name and address could not be spoken of."""


@click.command("peers", short_help="Show the peers of a cluster.")
@address_option
@cluster_option
@interface_option
@click.option("--wide", is_flag=True, help="Show all columns, however wide the terminal is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(
    addresses: tuple[str, ...], cluster: str, interfaces: tuple[str, ...], wide: bool, as_json: bool
) -> None:
    """Name, address, device, free memory and loaded models of every peer that answers.

    The last columns say what of its memory is kept for weights and for keys and values (KV), what a
    GPU's host holds of either that the GPU has no room for, and what of keys and values is on disk
    now: of requests under way, and of earlier prompts' beginnings (see
    `edge peer --kv-disk`).

    \b
    Examples:
      edge peers                              all that zeroconf finds within seconds
      edge peers --cluster attic --json       for scripts
      edge peers --peer 192.168.1.7:5000      one that zeroconf does not reach
    """
    wanted = ClusterOptions(addresses=addresses, cluster=cluster, interfaces=interfaces)
    with open_cluster(wanted) as found:
        peers = found.peers
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(peer) for peer in peers], indent=2))
        return
    table = Table(
        *("name", "address", "device", "free memory", "loaded"),
        *("weights", "in host memory", "KV in memory", "KV on disk"),
    )
    for peer in peers:
        loaded = ", ".join(
            f"{model['name']} {model['dtype']} (stage {model['stage']}, rank {model['rank']}, "
            f"{format_size(model['bytes'])} and {format_size(model['buffer_bytes'])} for steps"
            + (
                f", {format_size(model['streamed_bytes'])} from disk for each token"
                if model["streamed_bytes"]
                else ""
            )
            + ")"
            for model in peer.models
        )
        table.add_row(
            peer.name,
            peer.address,
            f"{peer.backend} on {peer.processor}, {peer.threads} threads",
            f"{format_size(peer.model_free_bytes)} of {format_size(peer.memory_bytes)}",
            loaded or "–",
            format_size(sum(model["bytes"] - model["kv_bytes"] for model in peer.models)),
            "–"
            if peer.host_memory_bytes is None
            else format_size(
                sum(model["host_bytes"] + model["kv_host_bytes"] for model in peer.models)
            ),
            format_size(sum(model["kv_bytes"] for model in peer.models)),
            format_size(sum(m["kv_disk_bytes"] for m in peer.models) + peer.kv_prefix_bytes),
        )
    Console().print(table)
