"""Peers of a cluster as they come, change and go."""

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
    """What has happened to a peer since the look before."""

    event: Literal["joined", "changed", "gone"]
    peer: PeerInfo
    """As it is now, or as it was last seen."""
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
    """Those that answer, every `every_s` and whenever one is announced or takes its leave; and
    those that did before, and are silent now.

    Those at the addresses, or without any those that zeroconf finds. Each keeps its name as long as
    this lasts. Raises NetworkError where this device cannot look.
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
    silence = peer.silent_s is not None, peer.is_lost
    return peer.software, peer.memory_bytes, peer.is_leaving, silence, peer.is_slow, models
