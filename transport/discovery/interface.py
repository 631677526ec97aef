"""The interface by which peers find each other, and its twin in memory.

Knows records; whether a peer that was found can be reached is for whoever connects to find out.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from edge.transport.discovery.peers import PeerEvent, PeerRecord, check_cluster
from edge.transport.discovery.watchers import Watchers
from edge.transport.errors import ChannelClosedError


class Discovery(Protocol):
    """Announces peers of one cluster and watches for others, from one event loop.

    What this object announces itself is not reported by its own ``watch``.
    """

    async def announce(self, record: PeerRecord) -> None:
        """Tell the others of ``record``, in place of an earlier record of the same id.

        Raises:
            ValueError: the record is of another cluster or cannot be announced.
            AddressError: the network cannot be used for announcing.
            ChannelClosedError: after :meth:`aclose`.
        """

    def watch(self) -> AsyncIterator[PeerEvent]:
        """First everyone who is there, then every change; ends with :meth:`aclose`.

        A peer seen several ways is one peer with all its addresses. ``PeerFound`` comes again when
        its record changes. Several watches may run at once, each seeing everything.

        Raises (from the first item):
            AddressError: the network cannot be used for watching.
        """

    async def aclose(self) -> None:
        """Withdraw what was announced and end every watch. May be called again."""

    def describe(self) -> str:
        """The method and the place, to complete the sentence "no peer found by ..."."""


class DiscoveryBus:
    """The network of memory discoveries: those that share a bus see each other."""

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
