"""Copying: loads the copies of a model, and further ones when devices come or come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from edge.errors import CapacityError, EdgeError, NetworkError
from edge.planning.copies import (
    CopiesForecast,
    copy_proposals,
    forecast_copies,
    of_a_copy,
)
from edge.planning.forecast import Forecast
from edge.planning.load_options import MOST_COPIES, LoadOptions
from edge.planning.measured_proposal import measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import OnProgress, ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.runs.copied_model import CopiedModel, ModelCopy
from edge.runs.load import load_model
from edge.runs.model import RunningModel
from edge.runs.recovery.candidates import Candidates
from edge.runs.recovery.reloading import Reloading
from edge.weights.checkpoint import Checkpoint

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
        """The context of all copies, once there is one."""
        self._refused: frozenset[tuple[str, int]] = frozenset()
        """Peers, by id and epoch, on which no copy fits."""
        self._turn = asyncio.Lock()
        """One at a time loads or frees copies."""
        self._tasks: list[asyncio.Task[None]] = []

    async def load(self, checkpoint: Checkpoint, tell: OnProgress) -> CopiesForecast | None:
        """Load the copies, unless `copies` is "auto" and one plan is predicted to be as fast for
        `concurrency` requests at once. Returns what is predicted, if it is known.

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
        if options.copies == "auto" and (predicted is None or predicted.way() == "one"):
            return predicted
        try:
            for proposal in plans:
                await self._add(checkpoint, proposal, peers, tell)
        except BaseException:
            await self._front.aclose()
            raise
        return predicted

    def begin(self) -> None:
        """Begin to look for devices."""
        self._tasks = [asyncio.create_task(self._watch_devices())]

    async def aclose(self) -> None:
        """Stop the tasks. May be called again."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _plans(
        self, checkpoint: Checkpoint, peers: Sequence[PeerInfo], most: int
    ) -> list[Proposal]:
        options = self._like.options
        if self._context_tokens is not None:
            options = replace(options, context_tokens=self._context_tokens)

        async def propose(peers: Sequence[PeerInfo], options: LoadOptions) -> Proposal:
            # One device alone is not measured; what is remembered of it says how fast it is.
            return await measured_proposal(
                checkpoint, peers, options, measure="needed", on_progress=ignore_progress
            )

        known = self._one.cluster
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
            candidates=lambda: self._free(devices),
            options=of_a_copy(self._like.options, proposal.context_tokens),
            forecast=forecast,
            peers={peer.id: peer for peer in peers},
            changed=asyncio.Event(),
        )
        running = RunningModel(
            reload, lambda answers, error: self._front.takes_over_from(running, answers, error)
        )
        delivery = reload.delivery(checkpoint, proposal, peers, tell)
        run = await load_model(delivery, peers, on_end=running.ended)
        reload.manifests = run.manifests
        running.begin(run)
        self._context_tokens = proposal.context_tokens
        self._like.peers |= {peer.id: peer for peer in peers}
        copy = ModelCopy(running=running, forecast=forecast, peers=reload.peers)
        self._front.add(copy)
        return copy

    def _free(self, own: set[str]) -> Sequence[PeerInfo]:
        """Candidates for a copy that is loaded again: its own devices."""
        return [peer for peer in self._candidates.peers if peer.id in own]

    def _in_use(self) -> Sequence[PeerInfo]:
        used = {id for copy in self._front.copies for id in copy.running.plan.devices}
        return [peer for id, peer in self._like.peers.items() if id in used]

    async def _watch_devices(self) -> None:
        try:
            async with contextlib.aclosing(self._candidates.looks(self._in_use)) as looks:
                async for there in looks:
                    if self._front.failure is not None:
                        return
                    async with self._turn:
                        await self._fill([peer for peer in there if not peer.is_leaving])
        except NetworkError as error:
            _log.info("devices that come back are not noticed: %s", error)
        except Exception:
            _log.exception("looking for devices for copies failed")

    async def _fill(self, there: Sequence[PeerInfo]) -> None:
        """Load copies on devices without a part, as long as there are too few."""
        missing = self._wanted - len(self._front.copies)
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
