"""Replanning: moves a running model to another plan where that pays for itself, after the cluster
has changed: peers have joined, devices are slowed by something else or healthy again, or there is a
faster network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from edge.answers.answer import Answer
from edge.errors import EdgeError, NetworkError
from edge.host.cache_paths import cache_root
from edge.partition import ClusterSpec, Estimate, Move, UnderWay
from edge.planning.able_peers import able_peers, needs_of
from edge.planning.cluster_profile import measured_cluster
from edge.planning.measured_proposal import measured_proposal
from edge.planning.move_words import move_reason
from edge.planning.proposal import Proposal
from edge.planning.proving import wrong_peers
from edge.planning.rate_words import rate_in_words
from edge.planning.repairing import moved_proposal
from edge.planning.slowdowns import WINDOW_S
from edge.progress import ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.runs.delivery import ship_ahead
from edge.runs.model import RunningModel
from edge.runs.recovery.candidates import LOOK_EVERY_S, Candidates
from edge.runs.recovery.faster_network import FasterNetwork
from edge.runs.recovery.pace import DevicePace
from edge.runs.recovery.quiet import Quiet
from edge.runs.recovery.reloading import Reloading
from edge.weights.checkpoint import Checkpoint

MOVES_APART_S = 60.0
"""Seconds between two moves: the first has to pay for itself in this time."""

CONSIDERS_AGAIN_S = 30.0
"""Seconds after which a move away from a busy device, or back, that did not pay for the answers
under way is considered again for those that are under way then."""

Peers = frozenset[tuple[str, int]]
"""Ids and epochs of peers."""

_log = logging.getLogger(__name__)


class Replanning:
    """Background tasks that look for peers that join and at the pace of devices, from construction
    until `aclose` or the end of the model. For one event loop."""

    def __init__(self, candidates: Candidates, reloading: Reloading, model: RunningModel) -> None:
        self._candidates, self._reloading, self._model = candidates, reloading, model
        self._planned: Proposal = reloading.forecast.proposal
        """The plan that runs."""
        self._waiting: Peers = frozenset()
        """Changed peers with which a better plan may exist, to be considered when no answer is
        under way."""
        self._refused: Peers = frozenset()
        """Peers with which no better plan exists."""
        self._there: Sequence[PeerInfo] = ()
        """Present peers without a part, at the last look."""
        self._next_move_s = self._consider_again_s = 0.0
        self._quiet = Quiet(model)
        self._network = FasterNetwork(candidates, reloading, model, self._quiet, self._in_use)
        self._pace = DevicePace(reloading, model)
        self._turn = asyncio.Lock()
        """One look at a time may move the model."""
        self._tasks = [asyncio.create_task(each) for each in (self._run(), self._watch_pace())]

    async def aclose(self) -> None:
        """Stop the tasks. May be called again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _watch_pace(self) -> None:
        while self._model.failure is None:
            await asyncio.sleep(WINDOW_S)
            try:
                await self._pace.look(self._there)
                if self._changed_pace(self._there):
                    async with self._turn:
                        await self._look_at(self._there)
            except Exception:
                _log.exception("looking at the pace of devices failed")

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._candidates.looks(self._in_use)) as looks:
                async for there in looks:
                    if self._model.failure is not None:
                        return
                    self._there = [peer for peer in there if not peer.is_leaving]
                    try:
                        async with self._turn:
                            await self._look_at(self._there)
                    except Exception:  # the next look comes all the same
                        _log.exception("considering another plan failed")
        except NetworkError as error:
            _log.info("peers that join are not noticed: %s", error)

    async def _look_at(self, there: Sequence[PeerInfo]) -> None:
        """Move to another plan, if peers have joined or devices have changed their pace and it
        pays. If it must wait for idle time, the move happens when no answer is under way, or at a
        later look."""
        loop = asyncio.get_running_loop()
        if await self._network.take(there):
            return
        is_rough = self._reloading.forecast.proposal.is_rough and not self._model.is_recovering
        if is_rough and loop.time() >= self._next_move_s:
            await self._measure_all(there)
        if (changed := self._changed(there)) is None or loop.time() < self._next_move_s:
            return
        try:
            is_due = loop.time() >= self._consider_again_s and self._changed_pace(there)
            if is_due or not (self._model.answers and changed <= self._waiting):
                self._consider_again_s = loop.time() + CONSIDERS_AGAIN_S
                await self._consider(there, changed)
            if changed <= self._waiting and await self._quiet.within(LOOK_EVERY_S):
                await self._consider(there, changed)
        except EdgeError as error:
            _log.info("the model stays on its plan: %s", error)
            self._next_move_s = loop.time() + MOVES_APART_S

    async def _measure_all(self, there: Sequence[PeerInfo]) -> None:
        """Measure the devices that were only looked at, while nothing is asked, and move to another
        plan if one pays now."""
        before = self._planned = self._reloading.forecast.proposal
        answering = {peer.id: peer for peer in (*self._reloading.peers.values(), *there)}
        ids = [device.id for device in before.cluster.devices]
        peers = [answering[id] for id in ids if id in answering]
        if not await self._quiet.comes():
            return
        options = self._reloading.options
        try:
            async with self._reloading.opened() as checkpoint:
                model = before.plan.model
                if await self._quiet.measured(checkpoint, peers, options, model) is None:
                    return
                same = await measured_proposal(
                    checkpoint,
                    peers,
                    replace(options, plan=before.plan),
                    measure="nothing",
                    on_progress=ignore_progress,
                )
                now = replace(before, cluster=same.cluster, notes=same.notes, choice=same.choice)
                move, proposal = await moved_proposal(
                    checkpoint,
                    peers,
                    options,
                    before=now,
                    measured=same.cluster,
                    under_way=_under_way(self._model.answers),
                )
                if self._reloading.forecast.proposal is not before or move.when == "idle":
                    return  # a device was lost meanwhile, or an answer began
                self._reloading.forecast.replace(now)
                self._planned = now
                if proposal is not None:
                    await self._move(checkpoint, peers, move, proposal, "the devices were measured")
        except EdgeError as error:
            _log.info("the devices were not measured: %s", error)
            self._next_move_s = asyncio.get_running_loop().time() + MOVES_APART_S

    def _changed(self, there: Sequence[PeerInfo]) -> Peers | None:
        """Peers that the plan was made without, and those whose pace has changed since. None if
        there is nothing to consider."""
        planned = self._reloading.forecast.proposal
        if planned is not self._planned:
            self._planned, self._waiting, self._refused = planned, frozenset(), frozenset()
        known = {device.id for device in planned.cluster.devices}
        new = frozenset((peer.id, peer.epoch) for peer in there if peer.id not in known)
        changed = (new - self._refused) | self._changed_pace(there)
        return None if not changed or self._model.is_recovering else changed

    def _changed_pace(self, there: Sequence[PeerInfo]) -> Peers:
        changed = self._pace.changed
        return frozenset((p.id, p.epoch) for p in (*self._in_use(), *there) if p.id in changed)

    def _in_use(self) -> Sequence[PeerInfo]:
        if self._model.is_recovering:
            return ()
        known = self._reloading.peers
        return [known[id] for id in self._model.plan.devices if id in known]

    async def _consider(self, there: Sequence[PeerInfo], changed: Peers) -> None:
        """Move to another plan if one pays now."""
        before, factors = self._planned, dict(self._pace.factors)
        if self._reloading.forecast.proposal is not before:
            return  # a device was lost meanwhile
        peers = [*self._in_use(), *(each for each in there if each.id not in before.plan.devices)]
        async with self._reloading.opened() as checkpoint:
            weight_format = self._reloading.options.weight_format(checkpoint)
            kv_dtype, windows = self._reloading.options.kv_dtype, before.limits.windows
            needs = needs_of(checkpoint.spec, weight_format, kv_dtype, keeps_windows=windows > 0)
            asked = [peer for peer in peers if not peer.lacking(needs)]
            wrong = await wrong_peers(asked, weight_format, cache_root=cache_root())
            peers, others = able_peers(peers, needs, wrong)
            for sentence in others:
                _log.info("%s", sentence)
            if {id for id, _epoch in changed}.isdisjoint(each.id for each in peers):
                self._refused |= changed
                return
            self._waiting |= changed
            if (measured := await self._measured(checkpoint, peers)) is None:
                return
            ids = {device.id for device in measured.devices}
            peers = [peer for peer in peers if peer.id in ids]
            now = replace(before, cluster=before.cluster.slowed_by(factors))
            move, proposal = await moved_proposal(
                checkpoint,
                peers,
                self._reloading.options,
                before=now,
                measured=measured.slowed_by(factors),
                under_way=_under_way(self._model.answers),
                is_healthy_again=any(
                    device.slowed > factors.get(device.id, 1.0) for device in before.cluster.devices
                ),
            )
            if move.when == "idle":
                return
            self._waiting -= changed
            names = {peer.id: peer.name for peer in peers}
            reason = move_reason(before, proposal, factors, names)
            if proposal is not None:
                await self._move(checkpoint, peers, move, proposal, reason)
            else:
                _log.info("%s: no other plan pays for a move", reason)
                if self._changed_pace(there) and self._reloading.forecast.proposal is before:
                    self._planned = replace(now, choice=replace(now.choice, predicted=move.before))
                    self._reloading.forecast.replace(self._planned)
            self._refused |= changed  # set last, so that failed shipping is tried again

    async def _measured(
        self, checkpoint: Checkpoint, peers: Sequence[PeerInfo]
    ) -> ClusterSpec | None:
        """Facts of the peers, after measuring those that lack them. If that would slow down answers
        under way: without those peers where a device has changed its pace, else None."""
        known = self._planned.cluster
        away = {each.id for each in known.devices} - {peer.id for peer in peers}
        if len(known.devices) - len(away) == len(peers):
            return known.without(*away)
        weight_format = self._reloading.options.weight_format(checkpoint)
        ask = partial(
            measured_cluster,
            peers,
            weight_format.graded(checkpoint.spec),
            weight_format,
            cache_root=cache_root(),
            on_note=_log.info,
        )
        remembered = await ask(only_remembered=True)
        before = {device.id: device.rates for device in known.devices}
        lacking = [
            peer
            for peer, device in zip(peers, remembered.devices, strict=True)
            if device.rates is None and before.get(peer.id) is None
        ]
        hosts = {peer.host for peer in self._in_use()}
        if self._model.answers:
            later = {peer.id for peer in lacking if peer.host in hosts}
            if later and not self._changed_pace(peers):
                return None
            new = {peer.id for peer in peers} - set(self._planned.plan.devices) - later
            return (await ask(only=new)).without(*later)
        if lacking and not await self._quiet.comes():
            return None
        model = self._planned.plan.model
        return await self._quiet.measured(checkpoint, peers, self._reloading.options, model)

    async def _move(
        self,
        checkpoint: Checkpoint,
        peers: Sequence[PeerInfo],
        move: Move,
        proposal: Proposal,
        reason: str,
    ) -> None:
        assert move.to is not None
        factors = dict(self._pace.factors)
        await ship_ahead(
            self._reloading.delivery(checkpoint, proposal, peers),
            {peer.id: peer for peer in peers},
        )
        if self._reloading.forecast.proposal is not self._planned or factors != self._pace.factors:
            return  # a device was lost or has changed its pace meanwhile
        self._next_move_s = asyncio.get_running_loop().time() + MOVES_APART_S
        if move.before is not None and move.to.predicted is not None:
            rate, before = _rate(move.to.predicted), _rate(move.before)
            mark = ";" if ": " in reason else ":"
            reason += f"{mark} {rate} tok/s predicted instead of {before}"
        _log.info("%s: a pause of %.1f s is predicted", reason, move.pause_s)
        self._model.move(reason, lambda on_end: self._reloading.by(proposal, on_end))


def _under_way(answers: Sequence[Answer]) -> UnderWay:
    left = [each.terms.max_new_tokens - len(each.tokens) for each in answers]
    return UnderWay(
        requests=len(answers),
        prompt_tokens=sum(len(each.terms.prompt) for each in answers),
        answer_tokens=max((len(each.tokens) for each in answers), default=0),
        left_tokens=max(left, default=0),
    )


def _rate(estimate: Estimate) -> str:
    return rate_in_words(estimate.tokens_per_s, estimate.tokens_per_s_range)
