"""Candidates: the peers that a cluster's models may use, as they come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence

from edge.errors import EdgeError, NetworkError
from edge.membership.presence import Broke, Missed, Presences
from edge.protocol.discovery import Look
from edge.protocol.peer_info import PeerInfo, describe_all, each_once, with_unique_names
from edge.protocol.silent_peers import silent_addresses

LOOK_EVERY_S = 10.0
"""Seconds between two looks for unused peers. Announced peers are described at once."""

FIRST_WAIT_S, MOST_WAIT_S = 30.0, 600.0
"""Seconds of waiting (backoff) for a peer that was lost twice, and the longest wait."""

Find = Callable[[Presences], Awaitable[tuple[Sequence[PeerInfo], Sequence[EdgeError]]]]
"""Finds the present peers, and the reasons why others are left out."""

Used = Callable[[], Collection[PeerInfo]]
"""The peers on which a model runs now."""

Watch = Callable[[Used, Presences, float], AsyncGenerator[Look]]
"""Looks at present, unused peers: at an interval in seconds, and whenever one comes or goes."""


_log = logging.getLogger(__name__)


class Candidates:
    """The candidates of one cluster; for one event loop."""

    def __init__(
        self, peers: Sequence[PeerInfo], find: Find | None = None, watch: Watch | None = None
    ) -> None:
        """find, watch: None if the peers were named; these are asked each time."""
        self.peers = with_unique_names(peers)
        """All peers ever seen, as they last described themselves, with unique names."""
        self._find, self._watch = find, watch
        self._presences = Presences()
        each_once(self.peers, self._presences)
        self._came: dict[str, tuple[int, float]] = {}
        """The epoch of each present peer, and since when it has been present without a break."""

    @property
    def are_announced(self) -> bool:
        """Whether zeroconf finds them. Others are used at the addresses that a user gave."""
        return self._find is not None

    def are_at(self, peers: Sequence[PeerInfo]) -> None:
        """Record the addresses at which these peers are reached from now on."""
        self._saw(peers)

    async def look(self) -> None:
        """Look for peers for a few seconds; new and returning ones become candidates. Raises
        NetworkError if there are none."""
        if self._find is not None:
            found, _left_out = await self._find(self._presences)
            self._saw(found)

    async def looks(self, used: Used) -> AsyncGenerator[tuple[PeerInfo, ...]]:
        """Present, unused peers, every LOOK_EVERY_S and as soon as one is announced. Peers that
        came and went are skipped for a while. A look that fails is logged, and others follow.

        Raises NetworkError if this device cannot look.
        """
        watch = self._watch or self._asked
        while True:
            try:
                async with contextlib.aclosing(watch(used, self._presences, LOOK_EVERY_S)) as looks:
                    async for look in looks:
                        found = look.peers
                        ids = {peer.id for peer in found if self._is_trusted(peer)}
                        self._missed({peer.id for peer in (*found, *used())})
                        self._saw(found)
                        yield tuple(peer for peer in self.peers if peer.id in ids)
                return
            except NetworkError:
                raise
            except Exception:
                _log.exception("looking for peers failed; it goes on in %g s", LOOK_EVERY_S)
                await asyncio.sleep(LOOK_EVERY_S)

    def lost(self, ids: Collection[str]) -> None:
        """Record that connections to these devices broke."""
        number = self._presences.look()
        for id in ids:
            current = self._presences.of(id).current
            if current is not None and current.state != "lost":
                self._presences.saw(Broke(id=id, epoch=current.epoch, number=number))

    async def _asked(
        self, used: Used, presences: Presences, every_s: float
    ) -> AsyncGenerator[Look]:
        while True:
            await asyncio.sleep(every_s)
            in_use = {peer.id for peer in used()}
            asked = {peer.address: peer.credentials for peer in self.peers if peer.id not in in_use}
            peers, failures = await describe_all(asked, presences=presences)
            yield Look(peers=peers, silent=silent_addresses(failures))

    def _missed(self, found: Collection[str]) -> None:
        number = self._presences.look()
        for peer in self.peers:
            current = self._presences.of(peer.id).current
            if peer.id not in found and current is not None:
                self._presences.saw(Missed(id=peer.id, epoch=current.epoch, number=number))
                self._came.pop(peer.id, None)

    def _is_trusted(self, peer: PeerInfo) -> bool:
        now_s = asyncio.get_running_loop().time()
        epoch, came_s = self._came.get(peer.id, (peer.epoch, now_s))
        if epoch != peer.epoch:
            came_s = now_s
        self._came[peer.id] = (peer.epoch, came_s)
        return now_s - came_s >= waits_s(self._presences.of(peer.id).losses)

    def _saw(self, found: Sequence[PeerInfo]) -> None:
        known = {peer.id: peer for peer in self.peers}
        known |= {peer.id: peer for peer in found}
        self.peers = with_unique_names(tuple(known.values()), self.peers)


def waits_s(losses: int) -> float:
    """Seconds that a peer must be present before a model moves to it, by its earlier losses
    (exponential backoff). The first loss does not count."""
    return 0.0 if losses <= 1 else min(MOST_WAIT_S, FIRST_WAIT_S * 3.0 ** (losses - 2))
