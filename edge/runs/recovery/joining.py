"""Joining: moves a running model to peers that join, if a move pays for itself, and to a faster
network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from edge.answers.answer import Answer
from edge.concurrency.blocking import run_blocking
from edge.errors import EdgeError, NetworkError
from edge.host.cache_paths import cache_root
from edge.partition import ClusterSpec, Estimate, Move, UnderWay
from edge.planning.able_peers import able_peers, needs_of
from edge.planning.cluster_profile import measured_cluster
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.planning.proving import wrong_peers
from edge.planning.rate_words import rate_in_words
from edge.planning.repairing import moved_proposal
from edge.progress import ignore_progress
from edge.protocol.fastest_address import by_fastest_address, shared_networks
from edge.protocol.peer_info import PeerInfo
from edge.runs.delivery import ship_ahead
from edge.runs.model import RunningModel
from edge.runs.recovery.candidates import LOOK_EVERY_S, Candidates
from edge.runs.recovery.quiet import Quiet
from edge.runs.recovery.reloading import Reloading
from edge.weights.checkpoint import Checkpoint

MOVES_APART_S = 60.0
"""Seconds between two moves: the first has to pay for itself in this time."""

Peers = frozenset[tuple[str, int]]
"""Ids and epochs of peers."""

_log = logging.getLogger(__name__)


class Joining:
    """A background task that looks for joining peers, from construction until `aclose` or the end
    of its model. For one event loop."""

    def __init__(self, candidates: Candidates, reloading: Reloading, model: RunningModel) -> None:
        self._candidates, self._reloading, self._model = candidates, reloading, model
        self._planned: Proposal = reloading.forecast.proposal
        """The plan that runs."""
        self._waiting: Peers = frozenset()
        """Peers with which a better plan may exist, to be considered when no answer is under
        way."""
        self._refused: Peers = frozenset()
        """Peers with which no better plan exists."""
        self._next_move_s = 0.0
        self._networks: frozenset[tuple[str, str]] | None = None
        """The networks to the plan's peers at the last look."""
        self._quiet = Quiet(model)
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop the task. May be called again."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._candidates.looks(self._in_use)) as looks:
                async for there in looks:
                    if self._model.failure is not None:
                        return
                    await self._look_at([peer for peer in there if not peer.is_leaving])
        except NetworkError as error:
            _log.info("peers that join are not noticed: %s", error)
        except Exception:
            _log.exception("looking for peers that join failed")

    async def _look_at(self, there: Sequence[PeerInfo]) -> None:
        """Move to a plan with the new peers, if there are any and it pays. If it must wait for idle
        time, the move happens when no answer is under way, or at a later look."""
        loop = asyncio.get_running_loop()
        if await self._takes_faster_network(there):
            return
        is_rough = self._reloading.forecast.proposal.is_rough and not self._model.is_recovering
        if is_rough and loop.time() >= self._next_move_s:
            await self._measure_all(there)
        if (new := self._new(there)) is None or loop.time() < self._next_move_s:
            return
        try:
            if not (self._model.answers and new <= self._waiting):
                await self._consider(there, new)
            if new <= self._waiting and await self._quiet.within(LOOK_EVERY_S):
                await self._consider(there, new)
        except EdgeError as error:
            _log.info("peers that joined are not used: %s", error)
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
                if await self._quiet.measured(checkpoint, peers, options, self._model_name) is None:
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

    async def _takes_faster_network(self, there: Sequence[PeerInfo]) -> bool:
        """Move the links of the plan where a network has appeared that is measured to be faster, in
        a moment without an answer under way. The plan stays. Returns whether they move.

        there: has a peer of the plan if its announcement has changed.
        """
        now = {peer.id: peer for peer in there}
        used = [
            replace(now.get(peer.id, peer), address=peer.address, reached_at=peer.reached_at)
            for peer in self._in_use()
        ]
        if not (used and self._candidates.are_announced):
            return False
        networks = await run_blocking(partial(shared_networks, used))
        if self._networks is None or networks <= self._networks:
            self._networks = networks
            return False
        if not await self._quiet.within(LOOK_EVERY_S):
            return False
        self._networks = networks
        found = await by_fastest_address(used)
        names = [
            peer.name
            for peer, before in zip(found, used, strict=True)
            if peer.reached_at != before.reached_at
        ]
        proposal = self._reloading.forecast.proposal
        if not names or self._model.is_recovering or self._model.answers:
            return False
        self._candidates.are_at(found)
        reason = f"a faster network leads to {', '.join(names)}"
        _log.warning(
            "%s: the model goes on there by the same plan. Load it again for a plan that is made "
            "for this network",
            reason,
        )
        self._model.move(reason, lambda on_end: self._reloading.by(proposal, on_end))
        return True

    @property
    def _model_name(self) -> str:
        return self._planned.plan.model

    def _new(self, there: Sequence[PeerInfo]) -> Peers | None:
        """Peers that the plan was made without. None if there is nothing to consider."""
        planned = self._reloading.forecast.proposal
        if planned is not self._planned:
            self._planned, self._waiting, self._refused = planned, frozenset(), frozenset()
        known = {device.id for device in planned.cluster.devices}
        new = frozenset((peer.id, peer.epoch) for peer in there if peer.id not in known)
        return None if new <= self._refused or self._model.is_recovering else new

    def _in_use(self) -> Sequence[PeerInfo]:
        if self._model.is_recovering:
            return ()
        known = self._reloading.peers
        return [known[id] for id in self._model.plan.devices if id in known]

    async def _consider(self, there: Sequence[PeerInfo], new: Peers) -> None:
        """Move to a plan with them if one pays now."""
        before = self._planned
        if self._reloading.forecast.proposal is not before:
            return  # a device was lost meanwhile
        peers = [*self._in_use(), *(each for each in there if each.id not in before.plan.devices)]
        async with self._reloading.opened() as checkpoint:
            weight_format = self._reloading.options.weight_format(checkpoint)
            wrong = await wrong_peers(peers, weight_format, cache_root=cache_root())
            kv_dtype, windows = self._reloading.options.kv_dtype, before.limits.windows
            needs = needs_of(checkpoint.spec, kv_dtype, keeps_windows=windows > 0)
            peers, others = able_peers(peers, needs, wrong)
            for sentence in others:
                _log.info("%s", sentence)
            if {id for id, _epoch in new}.isdisjoint(each.id for each in peers):
                self._refused |= new
                return
            self._waiting |= new
            if (measured := await self._measured(checkpoint, peers)) is None:
                return
            move, proposal = await moved_proposal(
                checkpoint,
                peers,
                self._reloading.options,
                before=before,
                measured=measured,
                under_way=_under_way(self._model.answers),
            )
            if move.when == "idle":
                return
            self._waiting -= new
            if proposal is None:
                names = ", ".join(each.name for each in there)
                _log.info("%s joined: no plan with them pays for a move", names)
            else:
                new_ids = set(proposal.plan.devices) - set(before.plan.devices)
                joined = ", ".join(each.name for each in peers if each.id in new_ids)
                await self._move(checkpoint, peers, move, proposal, f"{joined} joined")
            self._refused |= new  # set last, so that failed shipping is tried again

    async def _measured(
        self, checkpoint: Checkpoint, peers: Sequence[PeerInfo]
    ) -> ClusterSpec | None:
        """Facts of the peers, after measuring those that lack them. None if answers are under way,
        since measuring would slow them down."""
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
        before = {device.id: device.rates for device in self._planned.cluster.devices}
        lacking = [
            peer
            for peer, device in zip(peers, remembered.devices, strict=True)
            if device.rates is None and before.get(peer.id) is None
        ]
        hosts = {peer.host for peer in self._in_use()}
        if self._model.answers:
            if any(peer.host in hosts for peer in lacking):
                return None
            new = {peer.id for peer in peers} - set(self._planned.plan.devices)
            return await ask(only=new)
        if lacking and not await self._quiet.comes():
            return None
        return await self._quiet.measured(
            checkpoint, peers, self._reloading.options, self._model_name
        )

    async def _move(
        self,
        checkpoint: Checkpoint,
        peers: Sequence[PeerInfo],
        move: Move,
        proposal: Proposal,
        reason: str,
    ) -> None:
        assert move.to is not None
        await ship_ahead(
            self._reloading.delivery(checkpoint, proposal, peers),
            {peer.id: peer for peer in peers},
        )
        if self._reloading.forecast.proposal is not self._planned:
            return  # a device was lost meanwhile
        self._next_move_s = asyncio.get_running_loop().time() + MOVES_APART_S
        if move.before is not None and move.to.predicted is not None:
            rate, before = _rate(move.to.predicted), _rate(move.before)
            reason += f": {rate} tok/s predicted instead of {before}"
        _log.info("%s: a pause of %.1f s is predicted", reason, move.pause_s)
        self._model.move(reason, lambda on_end: self._reloading.by(proposal, on_end))


def _rate(estimate: Estimate) -> str:
    return rate_in_words(estimate.tokens_per_s, estimate.tokens_per_s_range)


def _under_way(answers: Sequence[Answer]) -> UnderWay:
    left = [each.terms.max_new_tokens - len(each.tokens) for each in answers]
    return UnderWay(
        requests=len(answers),
        prompt_tokens=sum(len(each.terms.prompt) for each in answers),
        answer_tokens=max((len(each.tokens) for each in answers), default=0),
        left_tokens=max(left, default=0),
    )
