"""`edge pair`: make two devices members of one cluster."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence

import click
import segno

from edge.errors import RequestError
from edge.host.addresses import reachable
from edge.host.started_again import edge_command
from edge.membership.current import CurrentMembership
from edge.membership.identity import fingerprint
from edge.membership.pairing import CODE_LASTS_S, Other, new_code, read_code
from edge.membership.pairing_discovery import find_and_join, invite
from edge.membership.roles import ROLES
from edge.membership.store import MembershipStore, config_root
from edge.protocol.peer_info import is_loopback
from edge.system.heap import with_malloc_settings
from edge.system.signals import run_in_loop


@click.command("pair", short_help="Make two devices members of one cluster.")
@click.argument("code", nargs=-1)
@click.option("--name", default=socket.gethostname, help="This device.  [default: the host's name]")
@click.option(
    "--peer",
    "address",
    metavar="HOST:PORT",
    help="With a code: the address that the other device shows, for networks without zeroconf.",
)
@click.option(
    "--listen",
    default=":0",
    show_default=True,
    metavar="HOST:PORT",
    help="Without a code: the address to wait on for the other device.",
)
@click.option(
    "--interface",
    "interfaces",
    multiple=True,
    metavar="NAME|IP",
    help="Search, and be found, only on this network interface; may be repeated.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    help="Without a code: the rights of the other device. lend: compute for others; use: have "
    "others compute for it.  [default: both]",
)
@click.option(
    "--lend",
    is_flag=True,
    help="Then lend this device until Ctrl-C, like edge peer.",
)
@click.option("--leave", is_flag=True, help="Leave the cluster that this device is in.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def command(
    code: tuple[str, ...],
    name: str,
    address: str | None,
    listen: str,
    interfaces: tuple[str, ...],
    roles: tuple[str, ...],
    lend: bool,
    leave: bool,
    as_json: bool,
) -> None:
    """Show a code of six words here; then give them to `edge pair` on the other device.

    The other device becomes a member of this one's cluster. Members may compute for each other;
    nobody else can use them or read their traffic. A code is valid for one device, one try and five
    minutes. No file needs to be copied. Other users of this device can see the words of a command
    while it runs: `edge pair -` asks for them on standard input instead.

    \b
    Examples:
      edge pair                                       shows six words
      edge pair --role use                            for a phone that computes nothing
      edge pair --lend                                and then runs as edge peer
      edge pair otter violin cedar atlas muffin kite  on the other device
      edge pair -                                     the same, and asks for the words
    """
    if code and roles:
        raise RequestError(
            "the device that shows the code sets the roles of this one", remedy="give --role there"
        )
    if code:
        words = _asked_for() if code == ("-",) else " ".join(code)
        _join(read_code(words), name, address, interfaces, leave=leave, as_json=as_json)
    else:
        _invite(name, listen, interfaces, roles or ROLES, as_json=as_json)
    if lend:
        _go_on_as_peer(name, interfaces, as_json=as_json)


def _asked_for() -> str:
    """The words from standard input, typed or piped."""
    if sys.stdin.isatty():
        click.echo("The six words: ", nl=False, err=True)
    return sys.stdin.readline()


def _invite(
    name: str, listen: str, interfaces: tuple[str, ...], roles: tuple[str, ...], *, as_json: bool
) -> None:
    own = CurrentMembership(name)
    words = new_code()

    def show(addresses: Sequence[str]) -> None:
        places = reachable(addresses, interfaces=interfaces or None)
        if as_json:
            click.echo(json.dumps({"code": words, "addresses": places}))
            return
        click.echo(f"On the other device, within {CODE_LASTS_S / 60:g} minutes:\n")
        click.echo(f"    edge pair {words}\n")
        segno.make(words, error="l").terminal(compact=True)
        click.echo(_hint(places[0], addresses))

    other = run_in_loop(
        invite(
            words,
            own,
            name,
            roles=roles,
            listen=listen,
            interfaces=interfaces or None,
            on_ready=show,
        )
    )
    _tell(other, own.current().identity.id, as_json=as_json)


def _hint(place: str, bound: Sequence[str]) -> str:
    """What to add on the other device. `place`: the first of this one's addresses, of those that
    are `bound`."""
    if is_loopback(place) and place not in bound:
        return (
            "Only this machine can reach it here. Connect it to a network, and start again with "
            "--listen :0."
        )
    if "%" in place:
        place = f"{place.partition('%')[0]}%INTERFACE]:{place.rpartition(':')[2]}"
        return (
            f"Where zeroconf does not reach, add --peer '{place}', with the interface of the other "
            "device that leads here."
        )
    peer = f"'{place}'" if "[" in place else place  # brackets mean something to shells
    return f"Where zeroconf does not reach, add --peer {peer}."


def _join(
    words: str,
    name: str,
    address: str | None,
    interfaces: tuple[str, ...],
    *,
    leave: bool,
    as_json: bool,
) -> None:
    store = MembershipStore(config_root())
    present = store.membership()
    if present is not None and present.others and not leave:
        raise RequestError(
            f"this device is in a cluster with {', '.join(present.others.values())}",
            remedy="add --leave to leave that cluster",
        )
    membership, other = run_in_loop(
        find_and_join(words, store.identity(), name, address=address, interfaces=interfaces or None)
    )
    store.keep(membership)
    _tell(other, membership.identity.id, as_json=as_json)


def _go_on_as_peer(name: str, interfaces: tuple[str, ...], *, as_json: bool) -> None:
    """Replace this process by a daemon, whose memory then has none of pairing's secrets."""
    options = ["--name", name]
    for interface in interfaces:
        options += ["--interface", interface]
    if as_json:
        options.append("--json")
    command = [*edge_command(), "peer", *options]
    sys.stdout.flush()
    os.execve(command[0], command, with_malloc_settings(os.environ))  # noqa: S606 - Edge itself


def _tell(other: Other, own_id: str, *, as_json: bool) -> None:
    if as_json:
        told = {"name": other.name, "id": other.id}
        click.echo(json.dumps({"paired": told, "own": own_id}))
        return
    click.echo(f"Paired with {other}; this device is {fingerprint(own_id)}.")
