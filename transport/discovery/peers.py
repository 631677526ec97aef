"""Peer records, as announced, and a table that merges them.

Knows records and their sources; knows nothing of how they travel.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.transport.frame import PROTOCOL_VERSION

MAX_PEERS = 1024
"""Most sources of records that are remembered. A local network with more is being flooded."""


MAX_ADDRESSES = 8
"""Most addresses of a peer that are announced and dialled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """The announcement of a peer."""

    id: str
    """Stays the same while the peer runs, on every network where it is seen."""
    name: str
    """For display."""
    cluster: str
    """Peers of different clusters do not see each other."""
    addresses: tuple[str, ...]
    """Addresses where it listens, each ``host:port``, the likeliest to be reached first."""
    protocol: int = PROTOCOL_VERSION
    """The protocol version it speaks."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Further facts to be known before a connection."""


@dataclass(frozen=True, slots=True)
class PeerFound:
    """A peer was found; sent again whenever its record changes."""

    record: PeerRecord


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer that was found is gone; sent once."""

    id: str


def check_cluster(record: PeerRecord, cluster: str) -> None:
    """Raise ``ValueError`` unless ``record`` is of ``cluster``, where nobody else would see it."""
    if record.cluster != cluster:
        raise ValueError(
            f"peer '{record.name}' of cluster '{record.cluster}' cannot be announced in cluster "
            f"'{cluster}'"
        )


PeerEvent = PeerFound | PeerGone


class PeerTable:
    """Merges the records of several sources into peers; pure.

    A source announces one record: an instance of a service on an interface, for example. A peer is
    there as long as one source has it.
    """

    def __init__(self) -> None:
        # In each peer's dictionary the latest source is last.
        self._by_peer: dict[str, dict[str, PeerRecord]] = {}
        self._peer_of: dict[str, str] = {}

    def peers(self) -> tuple[PeerRecord, ...]:
        """All present peers, in the order found."""
        return tuple(_merge(records) for records in self._by_peer.values())

    def seen(self, source: str, record: PeerRecord) -> list[PeerEvent]:
        """Note that ``source`` announces ``record``, instead of any earlier one."""
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
        """Note that ``source`` announces nothing any more."""
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
    """The latest of one peer's records (at least one), with the addresses of all of them up to the
    limit: the first of each source, then the second of each."""
    *_, latest = records.values()
    by_source = [record.addresses for _, record in sorted(records.items())]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_source))
    addresses = tuple(dict.fromkeys(each for each in in_turn if each is not None))
    return replace(latest, addresses=addresses[:MAX_ADDRESSES])
