"""Measures the links from this process to peers."""

from __future__ import annotations

from collections.abc import Sequence

from edge import transport
from edge.errors import EdgeError
from edge.protocol.client import map_transport_error
from edge.protocol.link_probe import probe
from edge.protocol.measurements import LinkTimes
from edge.protocol.peer_info import PeerInfo

_SMALL_BYTES = 16 << 10
"""About the size of a token's hidden state."""

_LARGE_BYTES = 8 << 20
"""Two thirds of a second at 100 Mbit/s; slower links get smaller messages."""


async def coordinator_links(peers: Sequence[PeerInfo]) -> dict[str, LinkTimes | EdgeError]:
    """Link times by peer id, or the error. One at a time, as all share this device's network."""
    found: dict[str, LinkTimes | EdgeError] = {}
    for peer in peers:
        try:
            link = await transport.connect_link(
                peer.address,
                hello={"name": "doctor", "probe": True},
                credentials=peer.credentials,
                device=peer.device_id,
            )
            found[peer.id] = await probe(link, small_bytes=_SMALL_BYTES, large_bytes=_LARGE_BYTES)
        except transport.TransportError as error:
            found[peer.id] = map_transport_error(error, peer.name)
        except EdgeError as error:
            found[peer.id] = error
    return found
