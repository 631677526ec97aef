"""Broadcast of peer events to several readers.

Knows events and their readers; knows nothing of where events come from.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from edge.transport.discovery.peers import PeerEvent, PeerFound, PeerRecord, PeerTable


class Watchers:
    """A peer table whose changes go to every reader, each at its own pace."""

    def __init__(self) -> None:
        self._table = PeerTable()
        self._queues: set[asyncio.Queue[PeerEvent | None]] = set()
        self._is_closed = False

    def seen(self, source: str, record: PeerRecord) -> None:
        """See :meth:`PeerTable.seen`."""
        self._tell(self._table.seen(source, record))

    def lost(self, source: str) -> None:
        """See :meth:`PeerTable.lost`."""
        self._tell(self._table.lost(source))

    async def watch(self) -> AsyncIterator[PeerEvent]:
        """All present peers, then every change, until :meth:`close`."""
        queue: asyncio.Queue[PeerEvent | None] = asyncio.Queue()
        for record in self._table.peers():
            queue.put_nowait(PeerFound(record))
        if self._is_closed:
            queue.put_nowait(None)
        self._queues.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

    def close(self) -> None:
        """End every watch after its queued events."""
        self._is_closed = True
        for queue in self._queues:
            queue.put_nowait(None)

    def _tell(self, events: Iterable[PeerEvent]) -> None:
        for event in events:
            for queue in self._queues:
                queue.put_nowait(event)
