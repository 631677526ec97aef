"""`edge ps`: the loaded models, their users and their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import click

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import Columns, json_option, make_table, print_json, print_table
from edge.host.free_memory import format_size
from edge.protocol.peer_info import PeerInfo


@click.command("ps", short_help="Show the loaded models and their users.")
@given_options("wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure"))
@json_option
def command(wanted: ClusterOptions, as_json: bool) -> None:
    """Show each model that peers have loaded: its format, its user, its devices and its memory.

    A model that one user has loaded twice is shown once, with all of its shards.

    \b
    Examples:
      edge ps
      edge ps --peer 192.168.1.7:5000 --json
    """
    with open_cluster(wanted) as found:
        models = loaded_models(found.peers)
    if as_json:
        print_json(models)
    elif models:
        print_table(make_table(models, _COLUMNS, right=("weights", "KV", "for steps")))
    else:
        count = len(found.peers)
        click.echo(f"No model is loaded on {count} peer{'' if count == 1 else 's'}.")


def loaded_models(peers: Sequence[PeerInfo]) -> list[dict[str, Any]]:
    """The models by name, format and user, with shards in plan order. A peer knows only its own
    sessions, so two loads of one model by one user cannot be told apart."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for peer in peers:
        for shard in peer.models:
            shards = found.setdefault((shard.name, shard.dtype, shard.user), [])
            shards.append(
                {
                    "peer": peer.name,
                    "stage": shard.stage,
                    "rank": shard.rank,
                    "weight_bytes": shard.bytes - shard.kv_bytes,
                    "kv_bytes": shard.kv_bytes,
                    "buffer_bytes": shard.buffer_bytes,
                    "streamed_bytes": shard.streamed_bytes,
                }
            )
    return [
        {
            "name": name,
            "dtype": dtype,
            "user": user,
            "shards": sorted(shards, key=itemgetter("stage", "rank")),
        }
        for (name, dtype, user), shards in sorted(found.items())
    ]


def _where(model: Mapping[str, Any]) -> str:
    """The devices by stage, in order; those of one stage are grouped."""
    stages: dict[int, list[str]] = {}
    for shard in model["shards"]:
        streamed = shard["streamed_bytes"]
        disk = f" ({format_size(streamed)} from disk)" if streamed else ""
        stages.setdefault(shard["stage"], []).append(shard["peer"] + disk)
    return " → ".join(" + ".join(names) for names in stages.values())


def _size(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda model: format_size(sum(shard[name] for shard in model["shards"]))


_COLUMNS: Columns[Mapping[str, Any]] = {
    "model": itemgetter("name"),
    "format": itemgetter("dtype"),
    "for": itemgetter("user"),
    "where": _where,
    "weights": _size("weight_bytes"),
    "KV": _size("kv_bytes"),
    "for steps": _size("buffer_bytes"),
}
