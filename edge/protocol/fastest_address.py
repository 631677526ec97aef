"""The fastest of several networks that lead to a peer, by a glance at each."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from edge import transport
from edge.errors import NetworkError
from edge.host.interfaces import addresses_beside, dial_order, own_addresses
from edge.protocol.link_probe import glance
from edge.protocol.peer_info import PeerInfo

_SMALL_BYTES = 16 << 10
"""About the size of a token's hidden state."""

_WITHIN_S = 0.5
"""Time limit of each connection and each glance; a network that is slower than this loses."""

_MOST_ADDRESSES = 4

_CLEARLY = 1.5
"""Times that another network must be faster: a glance is rough."""

_log = logging.getLogger(__name__)

Measure = Callable[[PeerInfo, str], Awaitable[float]]
"""Seconds that messages to the peer at this address take. Raises what `glanced_s` raises."""


async def glanced_s(peer: PeerInfo, address: str) -> float:
    """Seconds of a small and a medium message, there and back, over a link to `address`; it takes
    some milliseconds. Raises TransportError or NetworkError if that fails."""
    link = await transport.connect_link(
        address,
        hello={"name": "coordinator", "probe": True},
        credentials=peer.credentials,
        device=peer.device_id,
        timeout_s=_WITHIN_S,
    )
    found = await glance(link, small_bytes=_SMALL_BYTES, limit_s=_WITHIN_S)
    return found.echo_s.middle_s + found.there_s.middle_s + found.back_s.middle_s


def shared_networks(peers: Sequence[PeerInfo]) -> frozenset[tuple[str, str]]:
    """The networks that lead to these peers: a peer's id, and this device's interface."""
    return frozenset((peer.id, name) for peer in peers for name in addresses_beside(peer.addresses))


async def by_fastest_address(
    peers: Sequence[PeerInfo], measure: Measure = glanced_s
) -> list[PeerInfo]:
    """The peers, each at the address in the fastest network that this device shares with it.

    One is measured after the other. A peer in a single network with this device is not measured.
    Daemons of this device get its address in the network that most others are reached in: links
    between peers begin with the address at which the coordinator reaches one.
    """
    found = [await _fastest(peer, measure) for peer in peers]
    used = Counter(name for peer in found for name in addresses_beside([peer.reached_at]))
    if not used:
        return found
    ((most_used, _),) = used.most_common(1)
    return [_of_this_device(peer, most_used) for peer in found]


def _of_this_device(peer: PeerInfo, interface: str) -> PeerInfo:
    """The peer at this device's address on `interface`, if it is one of this device."""
    own = own_addresses(peer.addresses)
    if interface not in own or not own_addresses([peer.reached_at]):
        return peer
    return replace(peer, address=own[interface], reached_at=own[interface])


async def _fastest(peer: PeerInfo, measure: Measure) -> PeerInfo:
    addresses = list(addresses_beside(dial_order(peer.addresses)).values())[:_MOST_ADDRESSES]
    if len(addresses) < 2 or peer.reached_at not in addresses:
        return peer
    taken_s: dict[str, float] = {}
    for address in addresses:
        with contextlib.suppress(transport.TransportError, NetworkError):
            taken_s[address] = await measure(peer, address)
    if not taken_s:
        return peer
    best = min(taken_s, key=lambda address: taken_s[address])
    if taken_s.get(peer.reached_at, float("inf")) <= _CLEARLY * taken_s[best]:
        return peer
    _log.info("%s is reached at %s, which is faster than %s", peer.name, best, peer.reached_at)
    return replace(peer, address=best, reached_at=best)
