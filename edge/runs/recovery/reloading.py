"""Reloading: loads a model on the remaining peers, by a repaired plan (failover)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge.answers.answer import OnEnd
from edge.concurrency.blocking import run_blocking
from edge.errors import (
    CapacityError,
    CheckpointError,
    EdgeError,
    NetworkError,
    PeerError,
    PeerLostError,
)
from edge.host.cache_paths import cache_root
from edge.planning.forecast import Forecast
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal, in_form_of
from edge.planning.repairing import repaired_proposal
from edge.progress import OnProgress, ignore_progress
from edge.protocol.lease import Lease
from edge.protocol.peer_info import (
    PeerInfo,
    describe_all,
    gather_all,
    kept_by,
    take_over,
    with_unique_names,
)
from edge.protocol.topology import Seat
from edge.runs.delivery import Delivered, Delivery
from edge.runs.drafting import Drafting
from edge.runs.load import ShareRefusedError, load_model
from edge.runs.resolved import ResolvedLoad
from edge.runs.run import PlanRun
from edge.weights.checkpoint import Checkpoint

ANSWER_WITHIN_S = 2.0
"""A peer that does not answer within this time has no part in the next plan."""

LOST_ANSWERS_WITHIN_S = 0.5
"""The same for a device that counts as lost, of which perhaps only a connection broke."""
SAYS_WHAT_IT_KEEPS_WITHIN_S = 0.3
"""Seconds for a peer to list its cached shards; a slower one counts as having none."""
FREED_WITHIN_S = 2.0
"""Seconds in which a returning peer frees the memory of its lost connection, once told of it."""
FREED_LOOK_EVERY_S = 0.05

LOOK_EVERY_S = 0.5
"""Seconds between two looks for peers."""

_log = logging.getLogger(__name__)


class NoPeersError(NetworkError):
    """No peer is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRepair:
    """A repaired plan for the loss of one device, with its shards already in place."""

    before: Proposal
    """The plan that runs before the loss."""
    proposal: Proposal
    delivery: Delivery
    peers: Sequence[PeerInfo]
    """The peers present after the loss."""
    delivered: Mapping[Seat, Delivered]


TakeReady = Callable[[Collection[str]], ReadyRepair | None]
"""The ready repair for the loss of these devices, if there is one. The caller owns its clients."""


def nothing_is_ready(_lost: Collection[str]) -> None:
    """The TakeReady of a model without standbys."""


@dataclass(slots=True, kw_only=True)
class Reloading:
    """Everything needed to load a model again. Callable as a `Reload`."""

    candidates: Callable[[], Sequence[PeerInfo]]
    """Peers that may take part."""
    look_for_more: Callable[[], Awaitable[None]]
    """Looks for new candidates; may take a few seconds."""
    on_lost: Callable[[Collection[str]], None]
    """Called with devices that count as lost."""
    path: Path
    options: LoadOptions
    fingerprint: str
    """Fingerprint of the checkpoint's files."""
    forecast: Forecast
    """Compares replies with the plan that runs."""
    peers: dict[str, PeerInfo]
    """Present peers by id; kept up to date."""
    lease: Lease
    drafting: Drafting | None = None
    """The draft model, which follows the plan."""
    manifests: Mapping[Seat, str] = field(default_factory=dict)
    """Digest of each shard's weights, for the plan that runs or ran last."""
    take_ready: TakeReady = nothing_is_ready
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each reload."""
    came_back: tuple[PeerInfo, ...] = ()
    """Devices that count as lost but answered when last asked."""
    _waited_without: frozenset[str] | None = field(default=None, init=False)
    """The lost devices for which waiting was in vain."""

    async def __call__(self, lost: Collection[str], on_end: OnEnd) -> PlanRun:
        """Load without the lost devices. If too few peers are left, wait for more, once for each
        loss and as long as the options allow. Returning devices get a moment to free memory."""
        await self._stop_drafting()
        ids = {peer.name: peer.id for peer in self.candidates()}
        lost = {ids.get(each, each) for each in lost}
        self.on_lost(lost)
        loop = asyncio.get_running_loop()
        has_waited = self._waited_without == frozenset(lost)
        until_s = loop.time() + (0.0 if has_waited else self.options.wait_for_peers_s)
        freed_s = loop.time() + FREED_WITHIN_S
        while True:
            try:
                return await self._load_on_who_has_room(lost, on_end)
            except (CapacityError, NoPeersError):
                if self.came_back and loop.time() < freed_s:
                    # A peer that has not noticed its broken connection still holds the memory
                    # that the plan needs.
                    await gather_all(self._freed(peer) for peer in self.came_back)
                    await asyncio.sleep(FREED_LOOK_EVERY_S)
                    continue
                if loop.time() >= until_s:
                    self._waited_without = frozenset(lost)
                    raise
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, until_s - loop.time())))
            with contextlib.suppress(NetworkError):  # there may still be no peer
                await self.look_for_more()

    async def _stop_drafting(self) -> None:
        """Free the memory of the draft model, which the next plan may need."""
        if self.drafting is not None:
            await self.drafting.stop()

    async def _freed(self, peer: PeerInfo) -> None:
        with contextlib.suppress(NetworkError, PeerError):  # the peer may be gone after all
            await take_over(peer, self.lease)

    async def _load_on_who_has_room(self, lost: Collection[str], on_end: OnEnd) -> PlanRun:
        """Load without devices that refuse their part, for example with a full disk. If all refuse,
        each is asked again: another model, which lost the same device, may have changed their free
        memory."""
        refusals: dict[str, ShareRefusedError] = {}
        are_asked_again = False
        while True:
            try:
                return await self._load(lost, refusals.keys(), on_end)
            except ShareRefusedError as refusal:
                _log.info("%s", refusal)
                refusals[refusal.device] = refusal
            except (CapacityError, NoPeersError):
                if refusals and not are_asked_again:
                    are_asked_again = True
                    refusals.clear()
                    continue
                for first in refusals.values():
                    raise first from None
                raise

    async def _load(
        self, lost: Collection[str], refused: Collection[str], on_end: OnEnd
    ) -> PlanRun:
        if not refused and (ready := self.take_ready(lost)) is not None:
            try:
                return await self._loaded(
                    ready.delivery,
                    ready.proposal,
                    ready.peers,
                    ready.peers,
                    on_end,
                    ready.delivered,
                )
            except EdgeError as error:
                _log.info("the prepared repair cannot be used: %s", error)
        living, kept = await asyncio.gather(
            self._living(lost, self.candidates()), self.cached(self.candidates())
        )
        peers = [peer for peer in living if peer.id not in refused]
        if not peers:
            raise NoPeersError("no device that is left has room for the model")
        async with self.opened() as checkpoint:

            async def repaired(options: LoadOptions) -> Proposal:
                """The plan to go on with, with weights in the form of these options."""
                before = self.forecast.proposal
                if options is not self.options:
                    before = in_form_of(before, checkpoint, options)
                lost = set(before.plan.devices) - {peer.id for peer in peers}
                # A peer without keys that restarted has a new id at the same address.
                cached = {peer.id: kept.get(peer.id, ()) for peer in peers}
                return await repaired_proposal(
                    checkpoint, peers, options, before=before, lost=lost, cached=cached
                )

            options = self.options
            try:
                proposal = await repaired(options)
            except CapacityError:
                packed = options.for_peers(checkpoint, peers)
                if packed is options:
                    raise
                # Rounded otherwise, it goes on: on devices without kernels for blocks of files.
                options, proposal = packed, await repaired(packed)
            delivery = self.delivery(checkpoint, proposal, peers, options=options)
            run = await self._loaded(delivery, proposal, peers, living, on_end)
            self.options = options
            return run

    async def by(self, proposal: Proposal, on_end: OnEnd) -> PlanRun:
        """Load by this plan. Raises PeerLostError if one of its devices is missing."""
        await self._stop_drafting()
        wanted = [peer for peer in self.candidates() if peer.id in proposal.plan.devices]
        living = await self._living((), wanted)
        for peer in wanted:
            if peer.id not in {each.id for each in living}:
                raise PeerLostError(peer.name, "it has gone again")
        others = [peer for id, peer in self.peers.items() if id not in proposal.plan.devices]
        async with self.opened() as checkpoint:
            delivery = self.delivery(checkpoint, proposal, living)
            return await self._loaded(delivery, proposal, living, [*living, *others], on_end)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Checkpoint]:
        """The checkpoint. Raises CheckpointError if its files have changed."""
        opening = run_blocking(
            lambda: Checkpoint.open(
                self.path, lora=self.options.lora, further_head=self.options.has_further_head
            ),
            discard=Checkpoint.close,
        )
        with await opening as checkpoint:
            if checkpoint.store.fingerprint != self.fingerprint:
                raise CheckpointError(
                    f"{self.path} was changed since the model was loaded", remedy="load it again"
                )
            yield checkpoint

    def delivery(
        self,
        checkpoint: Checkpoint,
        proposal: Proposal,
        peers: Sequence[PeerInfo],
        tell: OnProgress = ignore_progress,
        *,
        options: LoadOptions | None = None,
    ) -> Delivery:
        """The delivery of this plan's shards to its peers, a part of `peers`. options: None: those
        of the model as it runs.

        Raises CapacityError if the longest context fits nowhere.
        """
        return Delivery(
            checkpoint=checkpoint,
            load=ResolvedLoad.of(checkpoint, options or self.options, proposal, peers),
            lease=self.lease,
            cache_root=cache_root(),
            tell=tell,
        )

    async def _loaded(
        self,
        delivery: Delivery,
        proposal: Proposal,
        peers: Sequence[PeerInfo],
        known: Sequence[PeerInfo],
        on_end: OnEnd,
        delivered: Mapping[Seat, Delivered] | None = None,
    ) -> PlanRun:
        loaded = await load_model(delivery, peers, on_end=on_end, delivered=delivered)
        self._waited_without = None
        self.forecast.replace(proposal)
        self.changed.set()
        self.manifests = loaded.manifests
        self.peers.clear()
        self.peers |= {peer.id: peer for peer in known}
        if self.drafting is not None:
            self.drafting.follow(loaded, proposal, known)
        return loaded

    async def cached(self, peers: Sequence[PeerInfo]) -> dict[str, list[Seat]]:
        """The seats whose weights each peer has on disk; none for a peer that is slow to say."""

        async def kept(peer: PeerInfo) -> list[Seat]:
            try:
                async with asyncio.timeout(SAYS_WHAT_IT_KEEPS_WITHIN_S):
                    names = {each.name for each in await kept_by(peer)}
            except (EdgeError, TimeoutError):
                return []  # the load asks again, and sends only missing pieces
            return [seat for seat, digest in self.manifests.items() if f"shards/{digest}" in names]

        found = await asyncio.gather(*(kept(peer) for peer in peers))
        return {peer.id: seats for peer, seats in zip(peers, found, strict=True)}

    async def _living(
        self, lost: Collection[str], candidates: Sequence[PeerInfo]
    ) -> Sequence[PeerInfo]:
        known = {peer.address: peer for peer in candidates}
        infos, _failures = await describe_all(
            {address: peer.credentials for address, peer in known.items()},
            timeouts_s={
                address: (LOST_ANSWERS_WITHIN_S if peer.id in lost else ANSWER_WITHIN_S)
                for address, peer in known.items()
            },
        )
        infos = [peer for peer in infos if not peer.is_leaving]
        self.came_back = tuple(peer for peer in infos if peer.id in lost)
        if not infos:
            gone = ", ".join(peer.name for peer in known.values())
            raise NoPeersError(f"none of the model's peers answers any more ({gone}); start them")
        return with_unique_names(infos, tuple(known.values()))
