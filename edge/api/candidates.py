"""Peers that a cluster's models may use, as they come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence

from edge.errors import EdgeError
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names

LOOK_EVERY_S = 10.0
"""Between two looks for peers that no model uses; those that are announced are asked at once."""

Find = Callable[[], Awaitable[tuple[Sequence[PeerInfo], Sequence[EdgeError]]]]
"""Who is there now, and why others are left out."""

Watch = Callable[[Callable[[], Collection[str]], float], AsyncGenerator[list[PeerInfo]]]
"""Who is there every so many seconds, and whenever one comes or goes, but for those at the
addresses that are given each time."""


class Candidates:
    """The peers of one cluster; used from one event loop."""

    def __init__(
        self, peers: Sequence[PeerInfo], find: Find | None = None, watch: Watch | None = None
    ) -> None:
        """find, watch: None where only these were named; they are asked each time."""
        self.peers = with_unique_names(peers)
        """All that were ever seen, as they last described themselves; no two have one name."""
        self._find, self._watch = find, watch

    async def look(self) -> None:
        """Peers that have come, or have come back, are among them. Takes a few seconds; raises
        NetworkError where nobody is there."""
        if self._find is not None:
            found, _left_out = await self._find()
            self._saw(found)

    async def looks(
        self, in_use: Callable[[], Collection[PeerInfo]]
    ) -> AsyncGenerator[tuple[PeerInfo, ...]]:
        """Those that are there and not in use, every LOOK_EVERY_S, or as soon as one is announced.

        Raises NetworkError where this device cannot look.
        """

        def addresses() -> set[str]:
            return {address for peer in in_use() for address in (peer.address, *peer.addresses)}

        looks = (self._watch or self._asked)(addresses, LOOK_EVERY_S)
        async with contextlib.aclosing(looks):
            async for found in looks:
                ids = {peer.id for peer in found}
                self._saw(found)
                yield tuple(peer for peer in self.peers if peer.id in ids)

    async def _asked(
        self, but: Callable[[], Collection[str]], every_s: float
    ) -> AsyncGenerator[list[PeerInfo]]:
        while True:
            await asyncio.sleep(every_s)
            passed_over = but()
            asked = {
                peer.address: peer.credentials
                for peer in self.peers
                if peer.address not in passed_over
            }
            yield (await describe_all(asked))[0]

    def _saw(self, found: Sequence[PeerInfo]) -> None:
        known = {peer.id: peer for peer in self.peers}
        known |= {peer.id: peer for peer in found}
        self.peers = with_unique_names(tuple(known.values()), self.peers)
