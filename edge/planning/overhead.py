"""Memory of devices apart from weights and KV caches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from edge.memory.lending import unused_by_decoding
from edge.memory.shard_memory import most_overhead
from edge.models.spec import TILED_ATTENTION, ModelSpec
from edge.protocol.peer_info import PeerInfo
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """A device's memory apart from weights and KV caches."""

    promised_bytes: int
    """The bound that its process stays under."""
    floor_bytes: int
    """Memory of the process without a model."""
    buffer_bytes: int
    """Upper bound for the buffers of the model's largest step, under any plan."""

    @classmethod
    def of(cls, peers: Sequence[PeerInfo], buffers: Mapping[str, int]) -> dict[str, Overhead]:
        """By device. buffers: `buffer_bytes` by device."""
        return {
            peer.id: cls(
                promised_bytes=peer.memory_bytes,
                floor_bytes=peer.floor_bytes,
                buffer_bytes=buffers[peer.id],
            )
            for peer in peers
        }


def step_buffers(
    spec: ModelSpec,
    limits: StepLimits,
    peers: Sequence[PeerInfo],
    *,
    stream: bool,
    kv_dtype: KvDtype,
) -> dict[str, int]:
    """Bytes of the largest step's buffers by device, under any plan for these peers."""
    return _by_device(
        peers,
        lambda has_tiles: most_overhead(
            spec,
            limits,
            may_split=len(peers) > 1,
            stream=stream,
            kv_dtype=kv_dtype,
            has_tiles=has_tiles,
        ),
    )


def unused_buffers(
    spec: ModelSpec, limits: StepLimits, peers: Sequence[PeerInfo], *, kv_dtype: KvDtype
) -> dict[str, int]:
    """Bytes of these buffers by device that a step of one token leaves unused."""
    return _by_device(
        peers,
        lambda has_tiles: unused_by_decoding(spec, limits, kv_dtype=kv_dtype, has_tiles=has_tiles),
    )


def _by_device(peers: Sequence[PeerInfo], of: Callable[[bool], int]) -> dict[str, int]:
    of = cache(of)
    return {peer.id: of(TILED_ATTENTION not in peer.lacks) for peer in peers}
