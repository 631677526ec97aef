"""Peers that share one memory, such as several daemons of one machine. Pure.

Each of them tells all that is free there, because it does not know the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from edge.partition import ClusterSpec
from edge.protocol.peer_info import PeerInfo


def sharing(peers: Iterable[PeerInfo]) -> Iterator[tuple[list[PeerInfo], int]]:
    """Two or more peers that share a memory, and the bytes of it that are free for models."""
    pools: dict[str, list[PeerInfo]] = defaultdict(list)
    for peer in peers:
        if peer.memory_pool:
            pools[peer.memory_pool].append(peer)
    for members in pools.values():
        if len(members) > 1:
            yield members, min(peer.pool_free_bytes for peer in members)


def with_memory_divided(
    cluster: ClusterSpec,
    peers: Iterable[PeerInfo],
    planned: Mapping[str, int],
    buffers: Mapping[str, int],
) -> ClusterSpec | None:
    """The cluster with equal parts for peers whose memory a plan would take more than once.

    planned: bytes of weights and KV caches by device. buffers: bytes
    for steps by device.
    None: the plan fits what is free.
    """
    most: dict[str, int] = {}
    for members, free_bytes in sharing(peers):
        taken = [planned[peer.id] + buffers[peer.id] for peer in members if peer.id in planned]
        if sum(taken) > free_bytes:
            part_bytes = free_bytes // len(members)
            most |= {peer.id: max(0, part_bytes - buffers[peer.id]) for peer in members}
    if not most:
        return None
    devices = (
        replace(each, memory_bytes=min(each.memory_bytes, most.get(each.id, each.memory_bytes)))
        for each in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))
