"""`edge cluster`: the members of this device's cluster, expulsion, and key rotation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import click

from edge.cli.records import json_option, print_json
from edge.errors import NetworkError, RequestError
from edge.membership.current import CurrentMembership
from edge.membership.identity import fingerprint
from edge.membership.membership import Membership
from edge.membership.store import TOKEN_VARIABLE, MembershipStore, config_root, write_token
from edge.protocol.discovery import find_peers
from edge.protocol.key_rotation_push import push_key_rotation
from edge.system.signals import run_in_loop
from edge.transport import Credentials

_TELL_FOR_S = 3.0

_interfaces = click.option(
    "--interface",
    "interfaces",
    multiple=True,
    metavar="NAME|IP",
    help="Tell members only on this network interface.",
)
_announced = click.option(
    "--cluster", default="default", show_default=True, help="The name that peers announce."
)


@click.group("cluster", short_help="Show this device's cluster, or expel a device.")
def command() -> None:
    """Manage the members of this device's cluster. `edge pair` adds a device.

    \b
    Examples:
      edge cluster show                    this device, and its paired devices
      edge cluster expel kitchen           for good; lists the members that were told
      edge cluster rotate                  a new key, if the old one may have leaked
      edge cluster token ~/edge-token      for scripts, which cannot type words
    """


@command.command()
@click.option("--leave", is_flag=True, help="Leave the cluster that this device is in.")
@click.option(
    "--token",
    "token_file",
    type=click.Path(path_type=Path),
    help="Write a token, too: see `edge cluster token`.",
)
def create(leave: bool, token_file: Path | None) -> None:
    """Make a new cluster of this device alone."""
    _check_no_token()
    store = MembershipStore(config_root())
    if store.membership() is None:
        made = store.founded(socket.gethostname())
    else:
        made = store.change(lambda newest: _renewed(newest, leave=leave))
    if token_file is not None:
        write_token(token_file, made)
    click.echo(f"Made cluster {fingerprint(made.cluster_id)}.")


@command.command()
@json_option
def show(as_json: bool) -> None:
    """Show this device, its paired devices, and expelled ones."""
    membership = CurrentMembership(socket.gethostname()).current()
    expelled = membership.expelled.ids
    if as_json:
        value = {
            "cluster": membership.cluster_id,
            "own": membership.identity.id,
            "roles": sorted(membership.roles),
            "takes_others_in": membership.authority is not None,
            "paired": {id: name for id, name in membership.others.items() if id not in expelled},
            "expelled": sorted(expelled),
            "epoch": membership.expelled.epoch,
            "generation": membership.generation,
        }
        print_json(value)
        return
    takes = ", takes others in" if membership.authority is not None else ""
    may = " and ".join(sorted(membership.roles)) or "do nothing"
    click.echo(f"cluster      {fingerprint(membership.cluster_id)}")
    click.echo(f"this device  {fingerprint(membership.identity.id)}  may {may}{takes}")
    for id, name in membership.others.items():
        click.echo(f"paired       {fingerprint(id)}  {name}{' (expelled)' * (id in expelled)}")
    for id in sorted(expelled - set(membership.others)):
        click.echo(f"expelled     {fingerprint(id)}")


@command.command()
@click.argument("device")
@_interfaces
@_announced
def expel(device: str, interfaces: tuple[str, ...], cluster: str) -> None:
    """Expel a device, by name or the beginning of its id, for good.

    Members that are announced are told at once. Daemons, of this device and of theirs, tell those
    that come later. The device can return with a new key only: remove its folder of keys, and pair
    it. The device that made the cluster cannot be expelled.
    """
    own = CurrentMembership(socket.gethostname())
    id = _meant(own.current(), device)
    own.change(lambda newest: newest.expelling(id))
    click.echo(f"Expelled {fingerprint(id)}.")
    told = _exchanged(own, cluster, interfaces)
    newest = own.current()
    others = {id: name for id, name in newest.others.items() if id not in newest.expelled.ids}
    away = [name for id, name in others.items() if id not in told]
    click.echo(
        f"{len(told)} of {len(others | told)} told{': ' * bool(told)}{', '.join(told.values())}."
        + (f" Not there: {', '.join(away)}." if away else "")
    )
    if away and MembershipStore(config_root()).is_telling():
        click.echo("The daemon of this device tells them as soon as they are there.")
    elif away:
        click.echo(
            "No daemon runs on this device to tell them when they return: start `edge peer`. Until "
            "a member has told them, they still accept the expelled device."
        )


def _exchanged(
    own: CurrentMembership, cluster: str, interfaces: tuple[str, ...]
) -> dict[str | None, str]:
    """The names, by id, of the announced devices, after expulsions were synchronised with them."""
    with contextlib.suppress(NetworkError):  # absent members hear it from another one
        finding = find_peers(
            cluster,
            own.credentials(),
            timeout_s=_TELL_FOR_S,
            interfaces=interfaces or None,
            expected=own.current().lenders,
        )
        found, _ = run_in_loop(finding)
        ours = own.current().identity.id
        return {peer.device_id: peer.own_name for peer in found if peer.device_id != ours}
    return {}


@command.command()
@click.option("--leave", is_flag=True, help="Take no other device along: pair them again.")
@click.option(
    "--with",
    "forgiven",
    multiple=True,
    metavar="DEVICE",
    help="Take this device along though it was expelled: anybody with a token could expel it.",
)
@_interfaces
@_announced
def rotate(
    leave: bool, forgiven: tuple[str, ...], interfaces: tuple[str, ...], cluster: str
) -> None:
    """Rotate the cluster's key, if the old one or a token may have leaked.

    The devices that this one has paired follow, except expelled ones. Present ones are told at
    once, others by the first member that they meet. Tokens become void.
    """
    _check_no_token()
    own, name = CurrentMembership(socket.gethostname()), socket.gethostname()
    if leave and forgiven:
        raise RequestError("--leave takes nobody along; leave it out, or --with")
    if leave:
        before = own.current()
        made = own.change(lambda newest: _renewed(newest, leave=True))
    else:
        ids = {_meant(own.current(), each) for each in forgiven}
        _exchanged(own, cluster, interfaces)  # devices that were expelled elsewhere do not follow
        before = own.current()
        made = own.change(lambda newest: newest.rotated(name, ids))
    click.echo(f"The cluster is {fingerprint(made.cluster_id)} now.")
    if made.taken_in:
        most = len(made.others)
        told = run_in_loop(_carried(own.credentials(), cluster, interfaces or None, most))
        names = ", ".join(made.others.values())
        click.echo(f"Of {names}, {told} have followed; others will when they meet a member.")
    expelled = before.expelled.ids - made.others.keys()
    gone = expelled | made.others.keys()
    if left := [name for id, name in before.others.items() if id not in gone]:
        click.echo(f"Pair these again: {', '.join(left)}.")
    if behind := [name for id, name in before.others.items() if id in expelled]:
        click.echo(
            f"Expelled, and left behind: {', '.join(behind)}. Anybody with a token may have "
            "expelled them: pair again those that you did not expel."
        )


async def _carried(
    credentials: Credentials, cluster: str, interfaces: tuple[str, ...] | None, most: int
) -> int:
    """The number of announced peers that have the cluster's new key, at most `most`."""
    told = 0

    def count() -> None:
        nonlocal told
        told += 1
        if told >= most:
            carrying.cancel()

    carrying = asyncio.create_task(
        push_key_rotation(credentials, cluster, interfaces, on_carried=count)
    )
    await asyncio.wait([carrying], timeout=_TELL_FOR_S)
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    return told


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
def token(file: Path) -> None:
    """Write a token file for scripts, which cannot type words. Its holder is a member.

    Daemons and programs use it with EDGE_CLUSTER_TOKEN_FILE in their environment. It is as secret
    as the keys themselves, and valid until `edge cluster rotate`.
    """
    write_token(file, CurrentMembership(socket.gethostname()).current())
    click.echo(f"Wrote {file}; anybody who can read it is a member of the cluster.")


def _check_no_token() -> None:
    if path := os.environ.get(TOKEN_VARIABLE):
        raise RequestError(
            f"{TOKEN_VARIABLE} names {path}, and its cluster would stay in use",
            remedy="unset it, make a new cluster on one device, and write a new token there: "
            "`edge cluster token`",
        )


def _renewed(membership: Membership, *, leave: bool) -> Membership:
    """The device's membership of a new cluster. Raises RequestError if others would be left
    behind."""
    if membership.others and not leave:
        raise RequestError(
            f"this device is in a cluster with {', '.join(membership.others.values())}, which "
            "would have to be paired again",
            remedy="add --leave if you mean that",
        )
    return Membership.founded(socket.gethostname(), membership.identity)


def _meant(membership: Membership, device: str) -> str:
    wanted = device.replace(" ", "").lower()
    if len(wanted) == 32 and set(wanted) <= set("0123456789abcdef"):
        return wanted  # an id outweighs names, which devices choose themselves
    found = {
        id
        for id, name in membership.others.items()
        if name == device or (len(wanted) >= 4 and id.startswith(wanted))
    }
    if len(found) != 1:
        which = "no device" if not found else "several devices"
        raise RequestError(
            f"{device!r} names {which}", remedy="`edge cluster show --json` has their ids"
        )
    return found.pop()
