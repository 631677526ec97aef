"""Copying: loads the copies of a model, and further ones when devices come or come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from edge.answers.answer import OnEnd
from edge.errors import CapacityError, EdgeError, NetworkError, PeerLostError
from edge.planning.copies import (
    CopiesForecast,
    LoadSeen,
    Way,
    copy_proposals,
    forecast_copies,
    of_a_copy,
    with_rates,
)
from edge.planning.forecast import Forecast
from edge.planning.load_options import MOST_COPIES, LoadOptions
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import OnProgress, ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.runs.copied_model import CopiedModel, ModelCopy
from edge.runs.delivery import ship_ahead
from edge.runs.load import load_model
from edge.runs.model import Load, RunningModel
from edge.runs.recovery.candidates import Candidates
from edge.runs.recovery.reloading import Reloading
from edge.runs.recovery.replanning import MOVES_APART_S, Replanning
from edge.runs.run import PlanRun
from edge.weights.checkpoint import Checkpoint

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the requests at once."""

DRAINS_WITHIN_S = 30.0
"""Seconds in which answers under way end before a model changes between one plan and copies, while
new ones wait. Else it stays: their tokens could change where sums are in another order."""

DRAINED_LOOK_EVERY_S = 0.05

_log = logging.getLogger(__name__)


class Copying:
    """The copies of one model and, after `begin`, a background task that keeps their number. For
    one event loop."""

    def __init__(self, front: CopiedModel, candidates: Candidates, like: Reloading) -> None:
        """like: a load of one plan, with the options of the user, `peers` that answer, and the
        proposal for one plan."""
        self._front, self._candidates, self._like = front, candidates, like
        copies = like.options.copies
        self._wanted = copies if isinstance(copies, int) else MOST_COPIES
        self._one: Proposal = like.forecast.proposal
        """The proposal for one plan, with the rates of the devices."""
        self._context_tokens: int | None = None
        """The context that copies, and one plan in their place, keep; None before a load."""
        self._refused: frozenset[tuple[str, int]] = frozenset()
        """Peers, by id and epoch, on which no copy fits."""
        self._turn = asyncio.Lock()
        """One at a time loads or frees copies."""
        self._tasks: list[asyncio.Task[None]] = []
        self._way: Way = "copies"
        self._copy_plans: list[Proposal] = []
        """Plans of all copies, made while no part of the model was loaded."""
        self._replanning: Replanning | None = None

    async def load(self, checkpoint: Checkpoint, tell: OnProgress) -> None:
        """Load the copies; or one plan, if `copies` is "auto" and that is predicted to be as fast
        for `concurrency` requests at once.

        Raises the errors of `load_model`, and CapacityError if the model does not fit whole so many
        times; nothing is left on the peers then.
        """
        options, peers = self._like.options, list(self._like.peers.values())
        plans = await self._plans(checkpoint, peers, self._wanted)
        if options.copies != "auto" and len(plans) < self._wanted:
            raise CapacityError(
                f"{checkpoint.name} fits whole on {len(plans)} of {len(peers)} devices, and "
                f"{self._wanted} copies were asked for",
                remedy="ask for fewer copies, for copies auto, or for a shorter context",
            )
        predicted = forecast_copies(self._one, plans, options.concurrency)
        is_one = options.copies == "auto" and (predicted is None or predicted.way() == "one")
        if is_one:
            # Its users may count on its whole context, so no copies with a shorter one follow.
            self._context_tokens = self._one.context_tokens
            if any(each.context_tokens < self._context_tokens for each in plans):
                plans = await self._plans(checkpoint, peers, self._wanted)
                predicted = forecast_copies(self._one, plans, options.concurrency)
        self._copy_plans = plans
        try:
            await self._load("one" if is_one else "copies", checkpoint, tell)
        except BaseException:
            await self._front.aclose()
            raise
        self._tell(predicted)

    def begin(self) -> None:
        """Begin to look for devices, and for "auto" at the load."""
        self._tasks = [asyncio.create_task(self._watch_devices())]
        keeps_context = self._one.context_tokens >= (self._context_tokens or 0)
        if self._like.options.copies == "auto" and len(self._copy_plans) > 1 and keeps_context:
            self._tasks.append(asyncio.create_task(self._watch_load()))

    async def aclose(self) -> None:
        """Stop the tasks. May be called again."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._stop_replanning()

    async def _load(
        self, way: Way, checkpoint: Checkpoint, tell: OnProgress, *, without_lost: bool = False
    ) -> None:
        """Load one plan or all copies; nothing of the model is loaded before. without_lost: the one
        plan is repaired first, if devices of it do not answer."""
        peers = list(self._like.peers.values())
        self._way = way
        if way == "copies":
            for proposal in self._copy_plans:
                await self._add(checkpoint, proposal, peers, tell)
            return
        options = replace(self._like.options, copies=None)
        self._like.forecast.replace(self._one)
        reload = replace(self._like, options=options, peers={peer.id: peer for peer in peers})
        if without_lost:
            running = await self._begun(reload, partial(_on_who_is_left, reload))
        else:
            load = partial(_by, self._one, reload, checkpoint, peers, tell)
            running = await self._begun(reload, load)
        self._front.add(ModelCopy(running=running, forecast=reload.forecast, peers=reload.peers))
        if options.replan == "auto":
            self._replanning = Replanning(self._candidates, reload, running)

    async def _watch_load(self) -> None:
        """Change between one plan and copies where two windows in a row ask for it."""
        loop = asyncio.get_running_loop()
        seen, asked, next_change_s = LoadSeen(), 0, 0.0
        while self._front.failure is None:
            await asyncio.sleep(LOOK_EVERY_S)
            requests = seen.look(len(self._front.answers))
            if not requests or loop.time() < next_change_s:
                continue
            try:
                if self._way == "one":
                    self._one = self._like.forecast.proposal
                plans = [with_rates(each, self._one.cluster) for each in self._copy_plans]
                predicted = forecast_copies(self._one, plans, requests)
                self._tell(predicted)
                wants = predicted is not None and predicted.way(self._way) != self._way
                asked = asked + 1 if wants else 0
                if asked >= 2:
                    asked, next_change_s = 0, loop.time() + MOVES_APART_S
                    async with self._turn:
                        await self._change()
                    self._tell(predicted)
            except EdgeError as error:
                _log.info("the model stays as it is: %s", error)
            except Exception:
                _log.exception("changing between one plan and copies failed")

    async def _change(self) -> None:
        """Load copies in place of one plan, or the other way round, between answers."""
        other: Way = "one" if self._way == "copies" else "copies"
        peers = {peer.id: peer for peer in self._candidates.peers}
        async with self._like.opened() as checkpoint:
            for proposal in self._copy_plans if other == "copies" else (self._one,):
                delivery = self._like.delivery(checkpoint, proposal, list(peers.values()))
                await ship_ahead(delivery, peers)
            self._front.hold()
            try:
                if not await _drained(self._front):
                    return
                await self._stop_replanning()
                for copy in self._front.copies:
                    await self._front.remove(copy)
                before = self._way
                self._like.peers |= peers  # some may have come back at another address
                if not await self._loads(other, checkpoint):
                    await self._go_back(before, checkpoint)
                _log.info("%d requests at once: %s", len(self._front.answers), self._way)
            finally:
                self._front.release()

    async def _loads(self, way: Way, checkpoint: Checkpoint) -> bool:
        """Load one plan or all copies, and say whether that runs now. The first copies do so
        without the others, which are loaded once their devices are there."""
        try:
            await self._load(way, checkpoint, ignore_progress)
        except Exception as error:
            _log.info("%s: %s", way, error)
        return len(self._front.copies) >= (2 if way == "copies" else 1)

    async def _go_back(self, before: Way, checkpoint: Checkpoint) -> None:
        """Load what ran before a change that failed. Where a device of it is lost, too, the model
        goes on by a plan without that, as after any loss."""
        for copy in self._front.copies:
            await self._front.remove(copy)
        if before == "copies":
            await self._loads(before, checkpoint)
        if not self._front.copies:
            await self._load("one", checkpoint, ignore_progress, without_lost=True)

    def _tell(self, predicted: CopiesForecast | None) -> None:
        self._front.notes = () if predicted is None else (predicted.in_words(self._way),)

    async def _stop_replanning(self) -> None:
        replanning, self._replanning = self._replanning, None
        if replanning is not None:
            await replanning.aclose()

    async def _plans(
        self, checkpoint: Checkpoint, peers: Sequence[PeerInfo], most: int
    ) -> list[Proposal]:
        options = self._like.options
        if self._context_tokens is not None:
            options = replace(options, context_tokens=self._context_tokens)
        propose, known = partial(_proposed, checkpoint), self._one.cluster
        return await copy_proposals(propose, peers, options, most=most, known=known)

    async def _add(
        self,
        checkpoint: Checkpoint,
        proposal: Proposal,
        peers: Sequence[PeerInfo],
        tell: OnProgress = ignore_progress,
    ) -> ModelCopy:
        """Load a copy, and have it answer."""
        forecast = Forecast(proposal)
        devices = set(proposal.plan.devices)
        reload = replace(
            self._like,
            # It is loaded again on its own devices.
            candidates=lambda: [peer for peer in self._candidates.peers if peer.id in devices],
            options=of_a_copy(self._like.options, proposal.context_tokens),
            forecast=forecast,
            peers={peer.id: peer for peer in peers},
            changed=asyncio.Event(),
        )
        load = partial(_by, proposal, reload, checkpoint, peers, tell)
        running = await self._begun(reload, load)
        self._context_tokens = proposal.context_tokens
        self._like.peers |= {peer.id: peer for peer in peers}
        copy = ModelCopy(running=running, forecast=forecast, peers=reload.peers)
        self._front.add(copy)
        return copy

    async def _begun(self, reload: Reloading, load: Load) -> RunningModel:
        running = RunningModel(
            reload, lambda answers, error: self._front.takes_over_from(running, answers, error)
        )
        running.begin(await load(running.ended))
        return running

    def _in_use(self) -> Sequence[PeerInfo]:
        used = {id for copy in self._front.copies for id in copy.running.plan.devices}
        return [peer for id, peer in self._like.peers.items() if id in used]

    async def _watch_devices(self) -> None:
        try:
            async with contextlib.aclosing(self._candidates.looks(self._in_use)) as looks:
                async for there in looks:
                    if self._front.failure is not None:
                        return
                    try:
                        async with self._turn:
                            await self._fill([peer for peer in there if not peer.is_leaving])
                    except Exception:  # the next look comes all the same
                        _log.exception("loading further copies failed")
        except NetworkError as error:
            _log.info("devices that come back are not noticed: %s", error)

    async def _fill(self, there: Sequence[PeerInfo]) -> None:
        """Load copies on devices without a part, as long as there are too few."""
        missing = 0 if self._way == "one" else self._wanted - len(self._front.copies)
        used = {peer.id for peer in self._in_use()}
        free = [peer for peer in there if peer.id not in used]
        new = frozenset((peer.id, peer.epoch) for peer in free) - self._refused
        if missing <= 0 or not new:
            return
        try:
            async with self._like.opened() as checkpoint:
                plans = await self._plans(checkpoint, free, missing)
                if not plans:
                    self._refused |= new
                for proposal in plans:
                    copy = await self._add(checkpoint, proposal, free)
                    _log.info("a copy on %s answers, too", copy.in_words)
        except EdgeError as error:
            _log.info("no further copy was loaded: %s", error)


async def _drained(front: CopiedModel) -> bool:
    """Whether the answers on copies end within DRAINS_WITHIN_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + DRAINS_WITHIN_S
    while front.answers_on_copies and loop.time() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(min(DRAINED_LOOK_EVERY_S, LOOK_EVERY_S))
    return not front.answers_on_copies


async def _proposed(
    checkpoint: Checkpoint, peers: Sequence[PeerInfo], options: LoadOptions
) -> Proposal:
    """One device alone is not measured; what is remembered of it says how fast it is."""
    return await measured_proposal(
        checkpoint, peers, options, measure="needed", on_progress=ignore_progress
    )


async def _by(
    proposal: Proposal,
    reload: Reloading,
    checkpoint: Checkpoint,
    peers: Sequence[PeerInfo],
    tell: OnProgress,
    on_end: OnEnd,
) -> PlanRun:
    """Load by this plan, with all of its devices."""
    delivery = reload.delivery(checkpoint, proposal, peers, tell)
    run = await load_model(delivery, peers, on_end=on_end)
    reload.manifests = run.manifests
    return run


async def _on_who_is_left(reload: Reloading, on_end: OnEnd) -> PlanRun:
    """Load without devices that do not answer, or that are lost meanwhile."""
    lost: set[str] = set()
    while True:
        try:
            return await reload(lost, on_end)
        except PeerLostError as error:
            if error.peer in lost:
                raise
            lost.add(error.peer)
