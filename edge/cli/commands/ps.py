"""`edge ps`: which models are loaded, for whom, and on whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.host.free_memory import format_size
from edge.protocol.description import HostedModel
from edge.protocol.peer_info import PeerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model, as one device has it loaded."""

    name: str
    dtype: str
    user: str
    shards: tuple[tuple[PeerInfo, HostedModel], ...]
    """In the order of the plan."""

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "user": self.user,
            "shards": [
                {
                    "peer": peer.name,
                    "stage": shard.stage,
                    "rank": shard.rank,
                    "weight_bytes": shard.bytes - shard.kv_bytes,
                    "kv_bytes": shard.kv_bytes,
                    "buffer_bytes": shard.buffer_bytes,
                    "streamed_bytes": shard.streamed_bytes,
                }
                for peer, shard in self.shards
            ],
        }


@click.command("ps", short_help="Show which models are loaded, and for whom.")
@given_options("wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(wanted: ClusterOptions, as_json: bool) -> None:
    """Each model that peers have loaded: its format, for which device, where, and its memory.

    A model that one device has loaded twice is shown once, with all of its shards.

    \b
    Examples:
      edge ps
      edge ps --peer 192.168.1.7:5000 --json
    """
    with open_cluster(wanted) as found:
        models = loaded_models(found.peers)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in models], indent=2))
        return
    console = Console()
    if not models:
        count = len(found.peers)
        click.echo(f"No model is loaded on {count} peer{'' if count == 1 else 's'}.")
        return
    table = Table("model", "format", "for", "where", "weights", "KV", "for steps", pad_edge=False)
    for each in models:
        shards = [shard for _peer, shard in each.shards]
        table.add_row(
            escape(each.name),
            escape(each.dtype),
            escape(each.user),
            escape(_where(each)),
            format_size(sum(shard.bytes - shard.kv_bytes for shard in shards)),
            format_size(sum(shard.kv_bytes for shard in shards)),
            format_size(sum(shard.buffer_bytes for shard in shards)),
        )
    if not console.is_terminal:
        console.width = max(console.width, 200)
    console.print(table)


def loaded_models(peers: Sequence[PeerInfo]) -> list[Loaded]:
    """By name, format and user. Peers know of no session but their own, so shards of one model
    that a device has loaded twice cannot be told apart."""
    found: dict[tuple[str, str, str], list[tuple[PeerInfo, HostedModel]]] = {}
    for peer in peers:
        for shard in peer.models:
            found.setdefault((shard.name, shard.dtype, shard.user), []).append((peer, shard))
    return [
        Loaded(
            name=name,
            dtype=dtype,
            user=user,
            shards=tuple(sorted(shards, key=lambda each: (each[1].stage, each[1].rank))),
        )
        for (name, dtype, user), shards in sorted(found.items())
    ]


def _where(model: Loaded) -> str:
    """Stages from the first to the last; who shares one is named together."""
    stages: dict[int, list[str]] = {}
    for peer, shard in model.shards:
        disk = f" ({format_size(shard.streamed_bytes)} from disk)" if shard.streamed_bytes else ""
        stages.setdefault(shard.stage, []).append(peer.name + disk)
    return " → ".join(" + ".join(names) for _stage, names in sorted(stages.items()))
