"""Weights for a plan that a model is about to move to are sent while another one runs it."""

from __future__ import annotations

from collections.abc import Mapping

from edge.coordinator.bringing import Bringing
from edge.protocol.peer_info import PeerInfo


async def ship_ahead(bringing: Bringing, peers: Mapping[str, PeerInfo]) -> int:
    """Have every peer of the plan (by id) keep its part on disk; how many bytes that took.

    One peer after the other, for replies are under way; loading by this plan finds it there then.
    Raises what `load_model` raises where a peer has gone or has no room on its disk.
    """
    sent_bytes = 0
    async with bringing.source() as source:
        for stage, each in enumerate(bringing.plan.stages):
            for rank, share in enumerate(each.shards):
                peer = peers[share.device]
                shipment = await bringing.described((stage, rank), peer, source)
                client, sent = await bringing.send(shipment, peer)
                await client.aclose()
                sent_bytes += sent
    return sent_bytes
