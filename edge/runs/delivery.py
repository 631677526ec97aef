"""Delivers the shards of a plan to its peers, opens them, and prepares shards of later plans."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge.concurrency.blocking import StopFlag, run_blocking
from edge.progress import OnProgress, Progress, ignore_progress
from edge.protocol.assignment import Assignment
from edge.protocol.client import PeerClient
from edge.protocol.lease import Lease
from edge.protocol.peer_info import PeerInfo
from edge.protocol.session_frames import Close, Open, Opened
from edge.protocol.topology import Seat
from edge.runs.resolved import ResolvedLoad
from edge.runs.shipping import ShardShipment, describe_shard, ship
from edge.weights.checkpoint import Checkpoint
from edge.weights.matrix_kind import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A shard on its peer's disk. It stays there at least as long as the connection."""

    client: PeerClient
    manifest_digest: str
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredWeights:
    """Open sources of the weights that a load delivers."""

    model: WeightSource
    further: WeightSource | None
    """The further head's, if it is computed."""

    def close(self) -> None:
        self.model.close()
        if self.further is not None:
            self.further.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Delivers the shards of one plan to its peers."""

    checkpoint: Checkpoint
    load: ResolvedLoad
    lease: Lease
    cache_root: Path
    tell: OnProgress = ignore_progress
    stop: StopFlag = field(default_factory=StopFlag)
    """Stops the threads that quantize and hash, when the delivery is cancelled."""

    def on_progress(self, event: Progress) -> None:
        self.stop.check()
        self.tell(event)

    @contextlib.asynccontextmanager
    async def source(self) -> AsyncIterator[DeliveredWeights]:
        """The weights in the format in which they are sent."""
        source = await run_blocking(
            self._open_source, stop=self.stop.set, discard=DeliveredWeights.close
        )
        try:
            yield source
        finally:
            source.close()

    def _open_source(self) -> DeliveredWeights:
        load, root = self.load, self.cache_root / "quantized"
        last = (len(load.plan.stages) - 1, 0)
        model = self.checkpoint.source(
            load.weight_format, cache_root=root, on_progress=self.on_progress
        )
        head, further = load.further(last), None
        try:
            if head is not None:
                further = self.checkpoint.further_source(
                    head.weight_format, cache_root=root, on_progress=self.on_progress
                )
        except BaseException:
            model.close()
            raise
        return DeliveredWeights(model=model, further=further)

    async def described(
        self, seat: Seat, peer: PeerInfo, source: DeliveredWeights
    ) -> ShardShipment:
        head, weights = self.load.further(seat), source.further
        return await run_blocking(
            lambda: describe_shard(
                self.load.layout(seat),
                source.model,
                self.load.weight_format,
                None if head is None or weights is None else (head, weights),
                fingerprint=self.checkpoint.store.fingerprint,
                cache_root=self.cache_root / "manifests",
                on_progress=lambda done, total: self.on_progress(
                    Progress(phase="hash", peer=peer.name, done=done, total=total)
                ),
            ),
            stop=self.stop.set,
        )

    async def deliver(self, seat: Seat, peer: PeerInfo, source: DeliveredWeights) -> Delivered:
        """Send the peer the parts of the shard that it lacks. The caller closes the client."""
        shipment = await self.described(seat, peer, source)
        client, sent_bytes = await ship(
            shipment, peer.connect, peer=peer.name, on_progress=self.on_progress
        )
        return Delivered(
            client=client, manifest_digest=shipment.manifest.digest, sent_bytes=sent_bytes
        )

    async def open(self, session: str, seat: Seat, peer: PeerInfo, delivered: Delivered) -> Opened:
        """Have the peer load the shard."""
        load = self.load
        assignment = Assignment(
            session=session,
            model=load.spec,
            plan=load.plan,
            stage=seat[0],
            rank=seat[1],
            weight_format=load.weight_format,
            manifest_digest=delivered.manifest_digest,
            weights_digest=self.checkpoint.store.fingerprint,
            limits=load.limits,
            kv_dtype=load.kv_dtype,
            wire_rules=load.wire_rules,
            copies_kv=load.copies,
        )
        self.on_progress(Progress(phase="load", peer=peer.name, done=0, total=1))
        is_shared = load.share_prefixes or bool(load.trusted)
        opened = await delivered.client.call(
            Open(
                assignment=assignment,
                lease=self.lease,
                prefix_secret=peer.prefix_secret(is_shared=is_shared),
                prefixes_of=load.trusted,
                expected=load.expected.get(peer.id),
            )
        )
        self.on_progress(Progress(phase="load", peer=peer.name, done=1, total=1))
        return opened


async def make_ready(
    delivery: Delivery, seat: Seat, peer: PeerInfo, source: DeliveredWeights
) -> Delivered:
    """Have a peer load a shard and park it in memory for the next load, as long as nothing else
    needs the memory.

    Raises the errors of `load_model` if the peer has gone or has no room.
    """
    delivered = await delivery.deliver(seat, peer, source)
    try:
        session = uuid.uuid4().hex
        await delivery.open(session, seat, peer, delivered)
        await delivered.client.call(Close(session=session, parks=True))
    except BaseException:
        await delivered.client.aclose()
        raise
    return delivered


async def ship_ahead(delivery: Delivery, peers: Mapping[str, PeerInfo]) -> int:
    """Have every peer of the plan (by id) store its part on disk. Returns the bytes sent.

    One peer after the other, because replies are under way. A later load by this plan finds the
    parts there. Raises the errors of `load_model` if a peer has gone or its disk has no room.
    """
    sent_bytes = 0
    async with delivery.source() as source:
        for stage, each in enumerate(delivery.load.plan.stages):
            for rank, share in enumerate(each.shards):
                peer = peers[share.device]
                delivered = await delivery.deliver((stage, rank), peer, source)
                await delivered.client.aclose()
                sent_bytes += delivered.sent_bytes
    return sent_bytes
