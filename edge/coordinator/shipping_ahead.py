"""Weights for a plan that a model is about to move to are sent while another one runs it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from edge.concurrency.blocking import StopFlag, run_blocking
from edge.coordinator.shipping import ShardShipment, describe_shard, ship
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.progress import ignore_progress
from edge.protocol.peer_info import PeerInfo
from edge.weights.checkpoint import Checkpoint
from edge.weights.layout import shard_layout
from edge.weights.matrix_kind import WeightSource


async def ship_ahead(
    checkpoint: Checkpoint,
    peers: Mapping[str, PeerInfo],
    plan: Plan,
    options: LoadOptions,
    *,
    cache_root: Path,
) -> int:
    """Have every peer of the plan (by id) keep its part on disk; how many bytes that took.

    One peer after the other, for replies are under way; loading by this plan finds it there then.
    Raises what `load_model` raises where a peer has gone or has no room on its disk.
    """
    weight_format = options.weight_format(checkpoint)
    spec = weight_format.graded(checkpoint.spec)
    stop = StopFlag()
    source = await run_blocking(
        lambda: checkpoint.source(
            weight_format,
            cache_root=cache_root / "quantized",
            on_progress=lambda _event: stop.check(),
        ),
        stop=stop.set,
        discard=WeightSource.close,
    )
    manifests = cache_root / "manifests"

    def described(stage: int, rank: int) -> ShardShipment:
        return describe_shard(
            shard_layout(spec, plan, stage=stage, rank=rank),
            source,
            weight_format,
            fingerprint=checkpoint.store.fingerprint,
            cache_root=manifests,
            on_progress=lambda _done, _total: stop.check(),
        )

    sent_bytes = 0
    try:
        for stage, each in enumerate(plan.stages):
            for rank, share in enumerate(each.shards):
                shipment = await run_blocking(partial(described, stage, rank), stop=stop.set)
                peer = peers[share.device]
                client, sent = await ship(
                    shipment, peer.connect, peer=peer.name, on_progress=ignore_progress
                )
                await client.aclose()
                sent_bytes += sent
    finally:
        source.close()
    return sent_bytes
