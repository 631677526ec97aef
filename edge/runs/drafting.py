"""A draft model beside a model that runs: placed, linked with the sampler, and placed again.

It is a session of its own. If it is lost, answers go on without guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from edge.concurrency.blocking import run_blocking
from edge.errors import CheckpointError, EdgeError
from edge.host.cache_paths import cache_root
from edge.planning.draft_place import DraftPlace, place_draft
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.progress import OnProgress, ignore_progress
from edge.protocol.client import IT_LEAVES, PeerClient
from edge.protocol.draft_frames import DraftSource, ServeDrafts
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Event
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo, places
from edge.protocol.session_frames import Close, Connect
from edge.protocol.topology import Seat
from edge.runs.delivery import Delivery
from edge.runs.resolved import ResolvedLoad
from edge.runs.run import PlanRun
from edge.weights.checkpoint import Checkpoint

_SEAT: Seat = (0, 0)
_SAMPLER: Seat = (1, 0)
"""A name for the sampler's place beside the draft model's."""
_FREED_WITHIN_S = 1.0
"""Answers that wait for another plan wait no longer for the draft model's device."""

_log = logging.getLogger(__name__)


class Drafting:
    """The draft model of one model. For one event loop. Close with `aclose`."""

    def __init__(self, path: Path, fingerprint: str, options: LoadOptions, lease: Lease) -> None:
        """path, fingerprint: of the draft model's files. options: of the large model."""
        self._path, self._fingerprint = path, fingerprint
        self._options, self._lease = options, lease
        self._client: PeerClient | None = None
        """Connection to the device that drafts."""
        self._session = ""
        self._is_linked = False
        """The sampler asks it."""
        self._run: PlanRun | None = None
        self._placing: asyncio.Task[None] | None = None
        self._hanging_up: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def device(self) -> str | None:
        """The name of the device that drafts; None: none does at the moment."""
        return self._client.name if self._client is not None and self._is_linked else None

    async def start(
        self,
        run: PlanRun,
        place: DraftPlace,
        peers: Sequence[PeerInfo],
        draft: Checkpoint,
        tell: OnProgress = ignore_progress,
    ) -> None:
        """Load the draft model at this place, and link it with the sampler of the run. Does nothing
        where no tokens are guessed."""
        if not run.most_drafted:
            return
        sampler_id = run.plan.stages[-1].shards[0].device
        sampler = next(each for each in peers if each.id == sampler_id)
        peer = place.peer
        delivery = Delivery(
            checkpoint=draft,
            load=ResolvedLoad.of(draft, place.options, place.proposal, [peer]),
            lease=self._lease,
            cache_root=cache_root(),
            tell=tell,
        )
        async with delivery.source() as source:
            delivered = await delivery.deliver(_SEAT, peer, source)
        client, session = delivered.client, uuid.uuid4().hex
        self._client, self._session, self._run = client, session, run
        self._is_linked = False
        client.listen(self._on_event)
        client.watch(self._lost, lambda client: self._lost(f"{client.name}: {IT_LEAVES}"))
        try:
            await delivery.open(session, _SEAT, peer, delivered)
            where = places({_SEAT: peer, _SAMPLER: sampler})
            await client.call(Connect(session=session, places={_SEAT: where[_SEAT]}))
            await client.call(ServeDrafts(session=session, device=sampler.device_id))
            limits, spec = delivery.load.limits, delivery.load.spec
            await run.ask_drafts(
                DraftSource(
                    place=where[_SEAT],
                    session=session,
                    context_tokens=limits.context_tokens,
                    vocab_size=spec.vocab_size,
                    ahead=place.is_apart,
                )
            )
            self._is_linked = True
        except BaseException:
            await self._free()
            raise

    def follow(self, run: PlanRun, proposal: Proposal, peers: Sequence[PeerInfo]) -> None:
        """Place the draft model anew beside another plan, in the background."""
        if not self._is_closed:
            self._placing = asyncio.create_task(self._place(run, proposal, peers))

    async def stop(self) -> None:
        """Free the draft model, before its large model is loaded by another plan."""
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.wait([self._placing])
            self._placing = None
        await self._free()

    async def _free(self) -> None:
        client, self._client, self._run = self._client, None, None
        if client is None:
            return
        with contextlib.suppress(EdgeError):  # else the peer frees it when the connection ends
            await client.call(Close(session=self._session), limit_s=_FREED_WITHIN_S)
        await client.aclose()

    async def aclose(self) -> None:
        """Free it for good. May be called again."""
        self._is_closed = True
        await self.stop()
        await asyncio.gather(*self._hanging_up)

    async def _place(self, run: PlanRun, proposal: Proposal, peers: Sequence[PeerInfo]) -> None:
        try:
            opening = run_blocking(lambda: Checkpoint.open(self._path), discard=Checkpoint.close)
            with await opening as draft:
                if draft.store.fingerprint != self._fingerprint:
                    raise CheckpointError(f"{self._path} was changed since the model was loaded")
                place = await place_draft(draft, proposal, peers, self._options)
                await self.start(run, place, peers, draft)
            if self.device is not None:
                _log.info("%s", place.sentence)
        except EdgeError as error:
            _log.warning("answers go on without a draft model: %s", error)
        except Exception:
            _log.exception("placing the draft model failed; answers go on without it")

    def _on_event(self, client: PeerClient, event: Event) -> None:
        if isinstance(event, Failed):
            self._lost(event.as_error(client.name))

    def _lost(self, why: object) -> None:
        """The draft model does not answer any more."""
        client, self._client = self._client, None
        run, self._run = self._run, None
        if client is None or self._is_closed:
            return
        _log.warning("the draft model is lost, and answers go on without it: %s", why)
        hanging_up = asyncio.create_task(_hang_up(client, run))
        self._hanging_up.add(hanging_up)
        hanging_up.add_done_callback(self._hanging_up.discard)


async def _hang_up(client: PeerClient, run: PlanRun | None) -> None:
    """Have the sampler ask no more, which may not have noticed, and hang up."""
    with contextlib.suppress(EdgeError):
        if run is not None and run.failure is None:
            await run.ask_drafts(None)
    await client.aclose()
