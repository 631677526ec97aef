"""Devices without a part in the plan keep ready what they would take over of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from edge.api.candidates import LOOK_EVERY_S
from edge.api.reloading import Reloading
from edge.coordinator.bringing import Bringing, make_ready
from edge.coordinator.lasting_model import LastingModel
from edge.errors import CapacityError, EdgeError, NetworkError, PeerLostError, PlanError
from edge.planning.proposal import Proposal
from edge.planning.repairing import repaired_proposal
from edge.planning.standing_by import taken_over
from edge.protocol.client import PeerClient
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.protocol.topology import Seat
from edge.weights.layout import ShardLayout

_log = logging.getLogger(__name__)


class StandingBy:
    """Begins at once, and ends with `aclose` or its model. For one event loop.

    Whoever stands by has the weights in memory, as long as nothing else there needs the room.
    """

    def __init__(self, reloading: Reloading, lasting: LastingModel) -> None:
        self._reloading, self._lasting = reloading, lasting
        self._planned: Proposal | None = None
        """What is stood by for; None: it is to be looked anew who could."""
        self._known: frozenset[tuple[str, int]] = frozenset()
        """Who was there then, by id and epoch."""
        self._ready: list[PeerClient] = []
        """Their devices keep what was loaded over them, as long as they are open."""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """May be called again."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._lasting.failure is None:
                self._reloading.changed.clear()
                if not self._lasting.is_recovering:
                    await self._look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._reloading.changed.wait(), LOOK_EVERY_S)
        except Exception:
            _log.exception("having devices stand by failed")
        finally:
            await self._let_go()

    async def _look(self) -> None:
        before, candidates = self._reloading.forecast.proposal, self._reloading.candidates()
        known = frozenset((peer.id, peer.epoch) for peer in candidates)
        if before is self._planned and known == self._known:
            return
        self._planned, self._known = before, known
        await self._let_go()  # what it had is parked there for a moment yet
        try:
            await self._stand_by(before, candidates)
        except (PeerLostError, NetworkError) as error:
            _log.info("nobody stands by: %s", error)
            self._planned = None
        except EdgeError as error:  # it will be the same the next time
            _log.info("nobody stands by: %s", error)

    async def _stand_by(self, before: Proposal, candidates: Sequence[PeerInfo]) -> None:
        """Have the devices without a part load what they would take over, one after the other."""
        asked = {peer.address: peer.credentials for peer in candidates}
        infos, _failures = await describe_all(asked)
        living = with_unique_names([each for each in infos if not each.is_leaving], candidates)
        if {peer.id for peer in living} <= set(before.plan.devices):
            return
        cached = await self._reloading.cached(living)
        async with self._reloading.opened() as checkpoint:
            wanted: dict[tuple[str, ShardLayout], tuple[Seat, Bringing]] = {}
            for lost in before.plan.devices:
                there = [peer for peer in living if peer.id != lost]
                try:
                    repaired = await repaired_proposal(
                        checkpoint,
                        there,
                        self._reloading.options,
                        before=before,
                        lost={lost},
                        cached=cached,
                    )
                    bringing = self._reloading.bringing(checkpoint, repaired, there)
                except (CapacityError, PlanError):
                    continue  # it cannot go on without this one
                for device, seat in taken_over(before.plan, repaired.plan):
                    wanted.setdefault((device, bringing.layout(seat)), (seat, bringing))
            peers = {peer.id: peer for peer in living}
            for (device, layout), (seat, bringing) in wanted.items():
                async with bringing.source() as source:
                    client = await make_ready(bringing, seat, peers[device], source)
                self._ready.append(client)
                client.watch(lambda _error: self._lost())
                _log.info("%s stands by with layers %s", client.name, layout.layers)

    def _lost(self) -> None:
        self._planned = None
        self._reloading.changed.set()

    async def _let_go(self) -> None:
        ready, self._ready = self._ready, []
        for client in ready:
            await client.aclose()
