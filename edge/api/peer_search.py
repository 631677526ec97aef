"""The search for a cluster's peers: by zeroconf, by address, or as daemons of this machine."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from edge.api.absent_devices import note, worth_waiting
from edge.api.local_peers import LocalPeers, LocalSettings
from edge.api.own_credentials import lenders, own_credentials
from edge.concurrency.blocking import run_blocking
from edge.errors import EdgeError, RequestError, shown
from edge.membership.membership import Membership
from edge.membership.presence import Presences
from edge.membership.store import MembershipStore, config_root
from edge.planning.load_options import MOST_WAIT_S
from edge.protocol.discovery import Look, find_peers, watch_peers
from edge.protocol.fastest_address import by_fastest_address
from edge.protocol.peer_info import PeerInfo, describe_each
from edge.runs.recovery.candidates import Find, Used, Watch

Peer = str | PeerInfo
"""An address, or a peer that was found before."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPeers:
    """The peers of a cluster, and the way to find more of them later."""

    peers: Sequence[PeerInfo]
    left_out: Sequence[EdgeError] = ()
    """The errors of announced peers that were left out."""
    find: Find | None = None
    watch: Watch | None = None
    """See `Candidates`."""


async def discover(
    cluster: str,
    *,
    timeout_s: float,
    at_least: int,
    interfaces: Sequence[str] | None,
    insecure: bool,
) -> FoundPeers:
    """Peers that zeroconf finds; see `AsyncCluster.discover`."""
    if type(at_least) is not int or at_least < 1:
        raise RequestError(f"at_least must be a whole number of 1 or more, not {shown(at_least)}")
    wait_s: object = timeout_s
    is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
    if not is_number or not 0 <= timeout_s <= MOST_WAIT_S:
        raise RequestError(
            f"timeout_s must be 0 to {MOST_WAIT_S:g} seconds, not {shown(timeout_s)}"
        )
    own = await own_credentials(insecure=insecure)
    expected = {} if own is None else await lenders()
    peers, left_out = await find_peers(
        cluster,
        own,
        timeout_s=timeout_s,
        at_least=at_least,
        interfaces=interfaces,
        expected=await run_blocking(lambda: worth_waiting(cluster, expected)),
    )
    found = {peer.device_id for peer in peers}
    if interfaces is None:  # on some interfaces alone, not every device can be found
        await run_blocking(lambda: note(cluster, expected, found))
    peers = await by_fastest_address(peers)
    for failure in left_out:
        _log.warning("a peer is announced, but left out: %s", failure)
    if absent := sorted(name for id, name in expected.items() if id not in found):
        _log.warning("paired, but not found: %s", ", ".join(absent))

    async def find(presences: Presences) -> tuple[Sequence[PeerInfo], Sequence[EdgeError]]:
        peers, left_out = await find_peers(
            cluster, own, timeout_s=2.0, interfaces=interfaces, presences=presences
        )
        return await by_fastest_address(peers), left_out

    def watch(used: Used, presences: Presences, every_s: float) -> AsyncGenerator[Look]:
        return watch_peers(
            cluster,
            own,
            interfaces=interfaces,
            every_s=every_s,
            used=used,
            presences=presences,
        )

    return FoundPeers(peers=peers, left_out=tuple(left_out), find=find, watch=watch)


async def connect(peers: Peer | Sequence[Peer], *, insecure: bool) -> FoundPeers:
    """Peers at addresses; see `AsyncCluster.connect`."""
    wanted = [peers] if isinstance(peers, str | PeerInfo) else peers
    wanted = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    if not all(isinstance(peer, str | PeerInfo) for peer in wanted):
        raise RequestError(
            f"{shown(peers)} is not a list of peers", remedy="give addresses, as texts host:port"
        )
    if not wanted:
        raise RequestError(
            "no peer was named", remedy="give at least one address, as a text host:port"
        )
    own = None
    if any(isinstance(peer, str) for peer in wanted):
        own = await own_credentials(insecure=insecure)
    credentials = {
        peer if isinstance(peer, str) else peer.address: (
            own if isinstance(peer, str) else peer.credentials
        )
        for peer in wanted
    }
    return FoundPeers(peers=await describe_each(credentials))


async def start_daemons(
    daemons: LocalPeers, count: int, settings: LocalSettings, *, insecure: bool
) -> FoundPeers:
    """Start peers on this machine as `daemons`; the owner of `daemons` ends them."""
    own, handed = None, None
    if not insecure:
        cluster = await run_blocking(lambda: _cluster_of_a_run(settings))
        own, handed = cluster.shown().credentials_of_a_run(), cluster.handed
    await run_blocking(lambda: daemons.start(count, settings, handed))
    addresses = await run_blocking(daemons.addresses, stop=daemons.hang_up)
    return FoundPeers(peers=await describe_each(dict.fromkeys(addresses, own)))


def _cluster_of_a_run(settings: LocalSettings) -> Membership:
    """A cluster of local daemons and this process. A later run finds what they keep on disk."""
    keeps = settings.get("kv_disk") is not None
    identity = MembershipStore(config_root()).identity() if keeps else None
    return Membership.founded("local", identity)
