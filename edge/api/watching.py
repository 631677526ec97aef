"""Peers of a cluster as they come, change and go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.concurrency.blocking import run_blocking
from edge.membership.own import OwnMembership
from edge.protocol.discovery import watch_peers
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.transport import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChange:
    """What has happened to a peer since the look before."""

    event: Literal["joined", "changed", "gone"]
    peer: PeerInfo
    """As it is now, or as it was last seen."""
    before: PeerInfo | None = None
    """Of a peer that has changed."""


async def watched_peers(
    addresses: Sequence[str] = (),
    *,
    cluster: str = "default",
    interfaces: Sequence[str] | None = None,
    insecure: bool = False,
    every_s: float,
) -> AsyncGenerator[tuple[PeerInfo, ...]]:
    """Those that answer, every `every_s` and whenever one is announced or takes its leave.

    Those at the addresses, or without any those that zeroconf finds. Each keeps its name as long as
    this lasts. Raises NetworkError where this device cannot look.
    """
    shown = None
    if not insecure:
        own = await run_blocking(lambda: OwnMembership(socket.gethostname()))
        shown = own.credentials()
    looks = watch_peers(cluster, shown, interfaces=interfaces, every_s=every_s)
    if addresses:
        looks = _asked(dict.fromkeys(addresses, shown), every_s)
    known: dict[str, PeerInfo] = {}
    async with contextlib.aclosing(looks):
        async for look in looks:
            peers = with_unique_names(look, known.values())
            known |= {peer.id: peer for peer in peers}
            yield peers


async def _asked(
    shown: Mapping[str, Credentials | None], every_s: float
) -> AsyncGenerator[list[PeerInfo]]:
    while True:
        yield (await describe_all(shown))[0]
        await asyncio.sleep(every_s)


def changes(before: Sequence[PeerInfo], after: Sequence[PeerInfo]) -> list[PeerChange]:
    """Who has gone, who has changed what it runs or offers, and who has come."""
    was, now = ({peer.id: peer for peer in look} for look in (before, after))
    gone = [PeerChange(event="gone", peer=was[id]) for id in was if id not in now]
    changed = [
        PeerChange(event="changed", peer=peer, before=was[id])
        for id, peer in now.items()
        if id in was and _offer(was[id]) != _offer(peer)
    ]
    joined = [PeerChange(event="joined", peer=now[id]) for id in now if id not in was]
    return gone + changed + joined


def _offer(peer: PeerInfo) -> object:
    """What is worth a word when it changes; free memory changes with every request."""
    models = tuple((model.name, model.dtype, model.stage, model.rank) for model in peer.models)
    return peer.software, peer.memory_bytes, peer.is_leaving, models
