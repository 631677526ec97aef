"""The interface of peer discovery, and an in-memory implementation.

Knows records; only a connection shows whether a discovered peer can be reached.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from edge.transport.discovery.peers import PeerEvent, PeerRecord, check_cluster
from edge.transport.discovery.watchers import Watchers
from edge.transport.errors import ChannelClosedError


class Discovery(Protocol):
    """Announces peers of one cluster and watches for others, from one event loop.

    Records that this object announces are not reported by its own ``watch``.
    """

    async def announce(self, record: PeerRecord) -> None:
        """Announce ``record``, in place of an earlier record of the same id.

        Raises:
            ValueError: the record is of another cluster or cannot be announced.
            AddressError: the network cannot be used for announcing.
            ChannelClosedError: after :meth:`aclose`.
        """

    def watch(self) -> AsyncIterator[PeerEvent]:
        """Watch for peers: first all present ones, then every change, until :meth:`aclose`.

        A peer seen in several ways is one peer with all its addresses. ``PeerFound`` comes again
        when its record changes. Several watches may run at once, each seeing everything.

        Raises (from the first item):
            AddressError: the network cannot be used for watching.
        """

    async def aclose(self) -> None:
        """Withdraw the announcements and end every watch. May be called again."""

    def describe(self) -> str:
        """The method and the place, to complete the sentence "no peer found by ..."."""


class DiscoveryBus:
    """A network in memory: discoveries on the same bus see each other."""

    def __init__(self) -> None:
        self.members: list[MemoryDiscovery] = []


class MemoryDiscovery:
    """Discovery within one event loop. See :class:`Discovery`."""

    def __init__(self, bus: DiscoveryBus, *, cluster: str = "default") -> None:
        self._bus = bus
        self._cluster = cluster
        self._own: dict[str, PeerRecord] = {}
        self._watchers = Watchers()
        self._is_closed = False
        for member in self._others():
            for record in member._own.values():
                self._watchers.seen(member._source(record.id), record)
        bus.members.append(self)

    async def announce(self, record: PeerRecord) -> None:
        if self._is_closed:
            raise ChannelClosedError("the discovery was closed")
        check_cluster(record, self._cluster)
        self._own[record.id] = record
        for member in self._others():
            member._watchers.seen(self._source(record.id), record)

    def watch(self) -> AsyncIterator[PeerEvent]:
        return self._watchers.watch()

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._bus.members.remove(self)
        for member in self._others():
            for peer in self._own:
                member._watchers.lost(self._source(peer))
        self._watchers.close()

    def describe(self) -> str:
        return f"memory within this process, cluster '{self._cluster}'"

    def _others(self) -> list["MemoryDiscovery"]:
        return [
            member
            for member in self._bus.members
            if member is not self and member._cluster == self._cluster
        ]

    def _source(self, peer: str) -> str:
        return f"{id(self)}/{peer}"
