"""Transport between peers: channels for control, links for data, discovery.

Knows nothing of models or plans. Faulty implementations for tests are in
``edge.transport.testing``.
"""

from typing import TYPE_CHECKING, Any

from edge.transport.address import format_address, parse_address, parse_number
from edge.transport.background import BackgroundWork
from edge.transport.channel import Channel, MemoryChannel
from edge.transport.collective import Collective, MeshCollective, SoloCollective
from edge.transport.credentials import Credentials, Member, Past
from edge.transport.discovery.interface import Discovery, DiscoveryBus, MemoryDiscovery
from edge.transport.discovery.peers import PeerEvent, PeerFound, PeerGone, PeerRecord
from edge.transport.encoded_collective import EncodedHop, open_mesh
from edge.transport.errors import (
    AddressError,
    ChannelClosedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    TransportError,
    VersionMismatchError,
)
from edge.transport.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, Frame
from edge.transport.handshake import MEMBER
from edge.transport.link import Link, LinkState
from edge.transport.link_guard import EAGER_BYTES
from edge.transport.listener import Listener, listen
from edge.transport.memory_link import MemoryLink
from edge.transport.network_interfaces import (
    interface_states,
    interfaces_in_order,
    is_link_local,
    with_scopes,
)
from edge.transport.tcp import bring_rotation, connect, connect_link
from edge.transport.tcp_channel import TcpChannel
from edge.transport.tcp_link import TcpLink
from edge.transport.wire_format import WIRE_FORMATS, WireFormatName, WireRule

if TYPE_CHECKING:
    from edge.transport.discovery.zeroconf import ZeroconfDiscovery

__all__ = [
    "EAGER_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MEMBER",
    "PROTOCOL_VERSION",
    "WIRE_FORMATS",
    "AddressError",
    "BackgroundWork",
    "Channel",
    "ChannelClosedError",
    "Collective",
    "Credentials",
    "Discovery",
    "DiscoveryBus",
    "EncodedHop",
    "Frame",
    "Link",
    "LinkState",
    "Listener",
    "Member",
    "MemoryChannel",
    "MemoryDiscovery",
    "MemoryLink",
    "MeshCollective",
    "Past",
    "PeerEvent",
    "PeerFound",
    "PeerGone",
    "PeerLostError",
    "PeerRecord",
    "ProtocolError",
    "RefusedError",
    "SoloCollective",
    "TcpChannel",
    "TcpLink",
    "TransportError",
    "VersionMismatchError",
    "WireFormatName",
    "WireRule",
    "ZeroconfDiscovery",
    "bring_rotation",
    "connect",
    "connect_link",
    "format_address",
    "interface_states",
    "interfaces_in_order",
    "is_link_local",
    "listen",
    "open_mesh",
    "parse_address",
    "parse_number",
    "with_scopes",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name

    def __getattr__(name: str) -> Any:
        """Zeroconf is imported at its first use: most processes are given their peers'
        addresses."""
        if name != "ZeroconfDiscovery":
            raise AttributeError(f"module 'edge.transport' has no attribute {name!r}")
        from edge.transport.discovery.zeroconf import ZeroconfDiscovery

        globals()[name] = ZeroconfDiscovery
        return ZeroconfDiscovery
