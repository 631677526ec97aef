"""How a shard of a plan comes onto its peer: described, sent, opened. And one that is to stay ready
there for a plan that may come."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge.concurrency.blocking import StopFlag, run_blocking
from edge.models.spec import ModelSpec
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.assignment import Assignment, Copies
from edge.protocol.client import PeerClient
from edge.protocol.lease import Lease
from edge.protocol.messages import Close, Open, Opened
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits
from edge.protocol.step_times import ExpectedStep
from edge.protocol.topology import Seat
from edge.protocol.wire_rules import WireRules
from edge.runs.shipping import ShardShipment, describe_shard, ship
from edge.weights.checkpoint import Checkpoint
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, shard_layout
from edge.weights.matrix_kind import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A shard on its peer's disk, where it stays at least as long as the connection."""

    client: PeerClient
    manifest_digest: str
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What the way of every shard of a plan needs to know."""

    checkpoint: Checkpoint
    plan: Plan
    options: LoadOptions
    weight_format: WeightFormat
    limits: StepLimits
    wire_rules: WireRules
    lease: Lease
    cache_root: Path
    copies_kv: Copies = "none"
    expected: Mapping[str, ExpectedStep] = field(default_factory=dict)
    """What the steps of peers should take, by id, as far as that is known."""
    tell: OnProgress = ignore_progress
    stop: StopFlag = field(default_factory=StopFlag)
    """How the threads that quantise and hash learn that nobody waits any more."""

    @property
    def spec(self) -> ModelSpec:
        return self.weight_format.graded(self.checkpoint.spec)

    def layout(self, seat: Seat) -> ShardLayout:
        return shard_layout(self.spec, self.plan, stage=seat[0], rank=seat[1])

    def on_progress(self, event: Progress) -> None:
        self.stop.check()
        self.tell(event)

    @contextlib.asynccontextmanager
    async def source(self) -> AsyncIterator[WeightSource]:
        """The weights as they are sent, rounded where they have to be."""
        source = await run_blocking(
            lambda: self.checkpoint.source(
                self.weight_format,
                cache_root=self.cache_root / "quantized",
                on_progress=self.on_progress,
            ),
            stop=self.stop.set,
            discard=lambda opened: opened.close(),  # WeightSource, a protocol, closes nothing
        )
        try:
            yield source
        finally:
            source.close()

    async def described(self, seat: Seat, peer: PeerInfo, source: WeightSource) -> ShardShipment:
        return await run_blocking(
            lambda: describe_shard(
                self.layout(seat),
                source,
                self.weight_format,
                fingerprint=self.checkpoint.store.fingerprint,
                cache_root=self.cache_root / "manifests",
                on_progress=lambda done, total: self.on_progress(
                    Progress(phase="hash", peer=peer.name, done=done, total=total)
                ),
            ),
            stop=self.stop.set,
        )

    async def bring(self, seat: Seat, peer: PeerInfo, source: WeightSource) -> Delivered:
        """Send the peer what it lacks of the shard. The client is the caller's to close."""
        shipment = await self.described(seat, peer, source)
        client, sent_bytes = await ship(
            shipment, peer.connect, peer=peer.name, on_progress=self.on_progress
        )
        return Delivered(
            client=client, manifest_digest=shipment.manifest.digest, sent_bytes=sent_bytes
        )

    async def open(self, session: str, seat: Seat, peer: PeerInfo, brought: Delivered) -> Opened:
        """Have the peer load what it was sent."""
        assignment = Assignment(
            session=session,
            model=self.spec,
            plan=self.plan,
            stage=seat[0],
            rank=seat[1],
            weight_format=self.weight_format,
            manifest_digest=brought.manifest_digest,
            weights_digest=self.checkpoint.store.fingerprint,
            limits=self.limits,
            kv_dtype=self.options.kv_dtype,
            wire_rules=self.wire_rules,
            copies_kv=self.copies_kv,
        )
        self.on_progress(Progress(phase="load", peer=peer.name, done=0, total=1))
        trusted = self.options.trusted
        is_shared = self.options.share_prefixes or bool(trusted)
        opened = await brought.client.call(
            Open(
                assignment=assignment,
                lease=self.lease,
                prefix_secret=peer.prefix_secret(is_shared=is_shared),
                prefixes_of=trusted,
                expected=self.expected.get(peer.id),
            )
        )
        self.on_progress(Progress(phase="load", peer=peer.name, done=1, total=1))
        return opened


async def make_ready(
    bringing: Delivery, seat: Seat, peer: PeerInfo, source: WeightSource
) -> Delivered:
    """Have a peer load a shard and keep it in memory, too, for whoever loads it next, as long as
    nothing else needs the memory.

    Raises what `load_model` raises where the peer has gone or has no room.
    """
    brought = await bringing.bring(seat, peer, source)
    try:
        session = uuid.uuid4().hex
        await bringing.open(session, seat, peer, brought)
        await brought.client.call(Close(session=session, parks=True))
    except BaseException:
        await brought.client.aclose()
        raise
    return brought


async def ship_ahead(bringing: Delivery, peers: Mapping[str, PeerInfo]) -> int:
    """Have every peer of the plan (by id) keep its part on disk; how many bytes that took.

    One peer after the other, for replies are under way; loading by this plan finds it there then.
    Raises what `load_model` raises where a peer has gone or has no room on its disk.
    """
    sent_bytes = 0
    async with bringing.source() as source:
        for stage, each in enumerate(bringing.plan.stages):
            for rank, share in enumerate(each.shards):
                peer = peers[share.device]
                brought = await bringing.bring((stage, rank), peer, source)
                await brought.client.aclose()
                sent_bytes += brought.sent_bytes
    return sent_bytes
