"""Standbys: devices without a part in the plan load the parts that they would take over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence

from edge.errors import CapacityError, EdgeError, NetworkError, PeerLostError, PlanError
from edge.planning.proposal import Proposal
from edge.planning.repairing import repaired_proposal
from edge.planning.standing_by import seats
from edge.protocol.client import PeerClient
from edge.protocol.peer_info import PeerInfo, describe_all, with_unique_names
from edge.runs.delivery import Delivered, Delivery, make_ready
from edge.runs.model import RunningModel
from edge.runs.recovery.candidates import LOOK_EVERY_S
from edge.runs.recovery.reloading import ReadyRepair, Reloading
from edge.weights.layout import ShardLayout, shard_layout

SETTLES_S = 1.0
"""Seconds of waiting after a plan began, because interrupted answers continue first."""

_DeliveredTo = dict[tuple[str, ShardLayout], Delivered]
"""Delivered shards by device id and layout."""

_log = logging.getLogger(__name__)


class StandingBy:
    """A background task that prepares standbys, from construction until `aclose` or the end of its
    model. For one event loop.

    Standbys keep weights in memory as long as no other use needs the room.
    """

    def __init__(self, reloading: Reloading, model: RunningModel) -> None:
        self._reloading, self._model = reloading, model
        self._planned: Proposal | None = None
        """The plan that standbys are prepared for. None: prepare again."""
        self._known: frozenset[tuple[str, int]] = frozenset()
        """The candidates when standbys were last prepared, by id and epoch."""
        self._away: Sequence[PeerInfo] = ()
        """Candidates that did not answer then."""
        self._clients: list[PeerClient] = []
        """Connections to standbys. A device keeps delivered shards while its connection is open."""
        self._repairs: dict[str, ReadyRepair] = {}
        """Ready repairs by the device that would be lost."""
        reloading.take_ready = self._take
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop the task. May be called again."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._model.failure is None:
                self._reloading.changed.clear()
                await asyncio.sleep(SETTLES_S)
                try:
                    if not self._model.is_recovering:
                        await self._look()
                except Exception:  # the next look comes all the same
                    _log.exception("having devices stand by failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._reloading.changed.wait()
        finally:
            await self._let_go()

    async def _look(self) -> None:
        before, candidates = self._reloading.forecast.proposal, self._reloading.candidates()
        known = frozenset((peer.id, peer.epoch) for peer in candidates)
        is_as_then = before is self._planned and known == self._known
        if is_as_then and not (self._away and await _living(self._away)):
            return
        self._planned, self._known, self._away = before, known, ()
        await self._let_go()  # the programs stay parked there for a moment
        try:
            await self._stand_by(before, candidates)
        except (PeerLostError, NetworkError) as error:
            _log.info("no device stands by: %s", error)
            self._planned = None
        except EdgeError as error:  # a retry would fail in the same way
            _log.info("no device stands by: %s", error)

    async def _stand_by(self, before: Proposal, candidates: Sequence[PeerInfo]) -> None:
        """Have devices without a part load the parts that they would take over, in turn."""
        living = await _living(candidates)
        answered = {each for peer in living for each in (peer.id, peer.address)}
        self._away = [peer for peer in candidates if answered.isdisjoint((peer.id, peer.address))]
        if {peer.id for peer in living} <= set(before.plan.devices):
            return
        cached = await self._reloading.cached(living)
        delivered: _DeliveredTo = {}
        async with self._reloading.opened() as checkpoint:
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
                    delivery = self._reloading.delivery(checkpoint, repaired, there)
                    await self._deliver(before, delivery, there, delivered)
                except (CapacityError, PlanError) as error:
                    # The model cannot go on without this device, or a peer has less room than it
                    # said.
                    _log.info("no device stands by for %s: %s", lost, error)
                    continue
                parts = {
                    seat: (id, delivery.load.layout(seat)) for id, seat in seats(repaired.plan)
                }
                if all(part in delivered for part in parts.values()):
                    self._repairs[lost] = ReadyRepair(
                        before=before,
                        proposal=repaired,
                        delivery=delivery,
                        peers=there,
                        delivered={seat: delivered[part] for seat, part in parts.items()},
                    )

    async def _deliver(
        self,
        before: Proposal,
        delivery: Delivery,
        peers: Sequence[PeerInfo],
        delivered: _DeliveredTo,
    ) -> None:
        """Have devices without a part load their parts of the repaired plan, and connect to devices
        that would keep their parts."""
        running = {
            (id, shard_layout(delivery.load.spec, before.plan, stage=stage, rank=rank))
            for id, (stage, rank) in seats(before.plan)
        }
        by_id = {peer.id: peer for peer in peers}
        async with delivery.source() as source:
            for id, seat in seats(delivery.load.plan):
                part = id, delivery.load.layout(seat)
                is_new = id not in before.plan.devices
                if self._model.is_recovering:
                    return  # the next plan comes first
                if part in delivered or not (is_new or part in running):
                    continue  # do not prepare other parts for devices that already have one
                deliver = make_ready if is_new else Delivery.deliver
                found = await deliver(delivery, seat, by_id[id], source)
                delivered[part] = found
                self._clients.append(found.client)
                found.client.watch(lambda _error: self._lost())
                if is_new:
                    _log.info("%s stands by with layers %s", found.client.name, part[1].layers)

    def _take(self, lost: Collection[str]) -> ReadyRepair | None:
        """See `TakeReady`. Nothing is ready afterwards until the next look."""
        if len(lost) != 1:
            return None
        (device,) = lost
        repairs, self._repairs = self._repairs, {}
        found = repairs.get(device)
        if found is None or found.before is not self._reloading.forecast.proposal:
            return None
        taken = {id(each.client) for each in found.delivered.values()}
        self._clients = [each for each in self._clients if id(each) not in taken]
        return found

    def _lost(self) -> None:
        self._planned = None
        self._reloading.changed.set()

    async def _let_go(self) -> None:
        self._repairs.clear()
        while self._clients:
            await self._clients[-1].aclose()
            self._clients.pop()  # removed after closing, so that a cancelled close is repeated


async def _living(peers: Sequence[PeerInfo]) -> Sequence[PeerInfo]:
    infos, _failures = await describe_all({peer.address: peer.credentials for peer in peers})
    return with_unique_names([each for each in infos if not each.is_leaving], peers)
