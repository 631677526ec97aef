"""`edge memory`: changes the memory limit of a running daemon."""

from __future__ import annotations

from dataclasses import replace

import click

from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import json_option, print_json
from edge.errors import RequestError
from edge.host.free_memory import format_size
from edge.protocol.peer_info import PeerInfo


@click.command("memory", short_help="Set the memory limit of a running peer.")
@click.argument("peer")
@click.argument("size")
@given_options("wanted", ClusterOptions, only=("cluster", "interfaces", "insecure"))
@json_option
def command(peer: str, size: str, wanted: ClusterOptions, as_json: bool) -> None:
    """Set the memory limit of PEER, a name or HOST:PORT, to SIZE, while it runs.

    With less, layers of its models are read from disk for each token (weight offload): replies
    under way continue with the same tokens, more slowly. With more, those layers return to memory.
    Below the minimum of the loaded models the peer refuses, and its limit does not change.

    \b
    Examples:
      edge memory attic 2GiB
      edge memory 192.168.1.7:5000 500MiB --json
    """
    is_address = ":" in peer
    if is_address:
        wanted = replace(wanted, addresses=(peer,))
    with open_cluster(wanted) as found:
        named = [each for each in found.peers if is_address or each.name == peer]
        if len(named) != 1:
            raise RequestError(
                f"no peer is called {peer!r}",
                remedy=f"there are {', '.join(each.name for each in found.peers)}",
            )
        changed = found.set_memory(named[0], size)
    if as_json:
        print_json(changed.to_json())
    else:
        click.echo(_words(changed))


def _words(peer: PeerInfo) -> str:
    loaded = "".join(
        f" {model.name} reads {format_size(model.streamed_bytes)} from disk for each token."
        for model in peer.models
        if model.streamed_bytes
    )
    return (
        f"{peer.name} stays under {format_size(peer.memory_bytes)} from now on, of which "
        f"{format_size(peer.free_now_bytes)} are free.{loaded}"
    )
