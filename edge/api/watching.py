"""Watching a cluster: peers that join, change and leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.api.own_credentials import own_credentials
from edge.protocol.discovery import Look, watch_peers
from edge.protocol.heartbeat import PEER_SILENT_AFTER_S
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.protocol.silent_peers import SilentPeers, silent_addresses
from edge.transport import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChange:
    """A change of a peer since the previous look."""

    event: Literal["joined", "changed", "gone"]
    peer: PeerInfo
    """The peer now, or when it was last seen."""
    before: PeerInfo | None = None
    """A changed peer as it was before; None for other events."""


async def watched_peers(
    addresses: Sequence[str] = (),
    *,
    cluster: str = "default",
    interfaces: Sequence[str] | None = None,
    insecure: bool = False,
    every_s: float,
) -> AsyncGenerator[tuple[PeerInfo, ...]]:
    """The peers that answer, and those that answered before and are silent now. Yields every
    `every_s` seconds, and when a peer is announced or leaves.

    addresses: the peers to watch; empty: those that zeroconf finds. A peer keeps its name
    throughout. Raises NetworkError if this device cannot search.
    """
    shown = await own_credentials(insecure=insecure)
    looks = watch_peers(cluster, shown, interfaces=interfaces, every_s=every_s)
    if addresses:
        looks = _asked(dict.fromkeys(addresses, shown), every_s)
    known: dict[str, PeerInfo] = {}
    heard = SilentPeers()
    async with contextlib.aclosing(looks):
        async for look in looks:
            silent = heard.note(look.peers, look.silent, now_s=time.monotonic())
            peers = with_unique_names((*look.peers, *silent), known.values())
            known |= {peer.id: peer for peer in peers}
            yield peers


async def _asked(shown: Mapping[str, Credentials | None], every_s: float) -> AsyncGenerator[Look]:
    limits_s = dict.fromkeys(shown, PEER_SILENT_AFTER_S)
    while True:
        peers, failures = await describe_all(shown, limits_s)
        yield Look(peers=peers, silent=silent_addresses(failures))
        await asyncio.sleep(every_s)


def changes(before: Sequence[PeerInfo], after: Sequence[PeerInfo]) -> list[PeerChange]:
    """The peers that left, then those that changed their offer or their work, then new ones."""
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
    """The facts of a peer whose change is reported; free memory changes with every request."""
    models = tuple((model.name, model.dtype, model.stage, model.rank) for model in peer.models)
    silence = peer.silent_s is not None, peer.is_lost
    return peer.software, peer.memory_bytes, peer.is_leaving, silence, peer.is_slow, models
