"""What a broken link means to whoever asked: which device is lost, or who talks nonsense."""

from __future__ import annotations

from collections.abc import Mapping

import transport
from edge.errors import EdgeError, PeerLostError, ProtocolError
from edge.protocol.topology import Seat
from transport import Link


def link_error(
    error: transport.TransportError, links: Mapping[Seat, Link], names: Mapping[Seat, str]
) -> EdgeError:
    """As an error of ours, by the name of the device at the link's other end."""
    if not isinstance(error, transport.PeerLostError):
        return ProtocolError(str(error))
    for seat, link in links.items():
        if link.peer == error.peer:
            return PeerLostError(names[seat], error.reason)
    return PeerLostError(error.peer, error.reason)
