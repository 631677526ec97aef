"""The movement of bytes between peers: channels for control, links for data, discovery first.

Knows nothing of models or plans. Faulty twins for tests are in ``transport.testing``.
"""

from typing import TYPE_CHECKING, Any

from transport.address import format_address, parse_address
from transport.background import Work
from transport.channel import Channel, MemoryChannel
from transport.collective import Collective, MeshCollective, SoloCollective
from transport.credentials import Credentials, Member
from transport.discovery.interface import Discovery, DiscoveryBus, MemoryDiscovery
from transport.discovery.peers import PeerEvent, PeerFound, PeerGone, PeerRecord
from transport.encoded import EncodedHop, open_mesh
from transport.errors import (
    AddressError,
    ChannelClosedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    TransportError,
    VersionMismatchError,
)
from transport.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, Frame
from transport.handshake import MEMBER
from transport.link import Link
from transport.link_guard import EAGER_BYTES
from transport.listener import Listener, listen
from transport.memory_link import MemoryLink
from transport.tcp import connect, connect_link
from transport.tcp_channel import TcpChannel
from transport.tcp_link import TcpLink
from transport.wire_format import WIRE_FORMATS, WireFormatName, WireRule

if TYPE_CHECKING:
    from transport.discovery.zeroconf import ZeroconfDiscovery

__all__ = [
    "EAGER_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MEMBER",
    "PROTOCOL_VERSION",
    "WIRE_FORMATS",
    "AddressError",
    "Channel",
    "ChannelClosedError",
    "Collective",
    "Credentials",
    "Discovery",
    "DiscoveryBus",
    "EncodedHop",
    "Frame",
    "Link",
    "Listener",
    "Member",
    "MemoryChannel",
    "MemoryDiscovery",
    "MemoryLink",
    "MeshCollective",
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
    "Work",
    "ZeroconfDiscovery",
    "connect",
    "connect_link",
    "format_address",
    "listen",
    "open_mesh",
    "parse_address",
]

if not TYPE_CHECKING:  # or every name would be one of transport's to a type checker

    def __getattr__(name: str) -> Any:
        """Zeroconf is imported at its first use: most processes are told where their peers are."""
        if name != "ZeroconfDiscovery":
            raise AttributeError(f"module 'transport' has no attribute {name!r}")
        from transport.discovery.zeroconf import ZeroconfDiscovery

        globals()[name] = ZeroconfDiscovery
        return ZeroconfDiscovery
