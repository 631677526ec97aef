"""Peers as the network sees them: the record each one announces, and the table of who is there.

Knows records and where they were seen; knows nothing of how they travel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.transport.frame import PROTOCOL_VERSION

MAX_PEERS = 1024
"""Sources of records that are remembered. A local network that has more is being flooded."""


MAX_ADDRESSES = 8
"""Addresses of a peer that are told of it, and dialled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A peer as it announces itself."""

    id: str
    """Stays the same as long as the peer lives, on whichever network it is seen."""
    name: str
    """For people."""
    cluster: str
    """Peers of different clusters do not see each other."""
    addresses: tuple[str, ...]
    """Addresses where it listens, each ``host:port``."""
    protocol: int = PROTOCOL_VERSION
    """The protocol version it speaks."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Anything else it wants known before anyone connects."""


@dataclass(frozen=True, slots=True)
class PeerFound:
    """A peer is there; given again whenever its record changes."""

    record: PeerRecord


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer that was found is no longer there; given once."""

    id: str


def check_cluster(record: PeerRecord, cluster: str) -> None:
    """Raise ``ValueError`` unless ``record`` is of ``cluster``: nobody there would see it."""
    if record.cluster != cluster:
        raise ValueError(
            f"peer '{record.name}' of cluster '{record.cluster}' cannot be announced in cluster "
            f"'{cluster}'"
        )


PeerEvent = PeerFound | PeerGone


class PeerTable:
    """Merges what several sources say of the same peers; pure.

    A source is anything that announces one record: an instance of a service on an interface, say.
    A peer is there as long as one source has it.
    """

    def __init__(self) -> None:
        # In each peer's dictionary the latest source comes last.
        self._by_peer: dict[str, dict[str, PeerRecord]] = {}
        self._peer_of: dict[str, str] = {}

    def peers(self) -> tuple[PeerRecord, ...]:
        """Every peer that is there, in the order found."""
        return tuple(_merge(records) for records in self._by_peer.values())

    def seen(self, source: str, record: PeerRecord) -> list[PeerEvent]:
        """``source`` announces ``record``, whatever it announced before."""
        if source not in self._peer_of and len(self._peer_of) >= MAX_PEERS:
            return []
        events: list[PeerEvent] = []
        if self._peer_of.get(source, record.id) != record.id:
            events = self.lost(source)
        records = self._by_peer.setdefault(record.id, {})
        before = _merge(records) if records else None
        records.pop(source, None)
        records[source] = record
        self._peer_of[source] = record.id
        after = _merge(records)
        return events if after == before else [*events, PeerFound(after)]

    def lost(self, source: str) -> list[PeerEvent]:
        """``source`` announces nothing any more."""
        peer = self._peer_of.pop(source, None)
        if peer is None:
            return []
        records = self._by_peer[peer]
        before = _merge(records)
        del records[source]
        if not records:
            del self._by_peer[peer]
            return [PeerGone(peer)]
        after = _merge(records)
        return [] if after == before else [PeerFound(after)]


def _merge(records: Mapping[str, PeerRecord]) -> PeerRecord:
    """The latest of one peer's records (never none), with addresses of all of them, as
    far as anybody would dial them."""
    *_, latest = records.values()
    addresses = {address for record in records.values() for address in record.addresses}
    return replace(latest, addresses=tuple(sorted(addresses))[:MAX_ADDRESSES])
