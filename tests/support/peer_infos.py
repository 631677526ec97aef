"""Peers as they describe themselves, without any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.protocol.peer_info import PeerInfo

_PEER = PeerInfo(
    credentials=None,
    id="p",
    epoch=1,
    name="p",
    address="127.0.0.1:1",
    addresses=(),
    backend="ort",
    software="0",
    processor="CPU",
    threads=1,
    memory_bytes=1 << 40,
    floor_bytes=0,
    free_bytes=1 << 40,
    model_free_bytes=1 << 40,
    host="h",
    identity="i",
    kv_memory_bytes=None,
    kv_disk_bytes=0,
    kv_prefix_bytes=0,
    models=(),
)


def peer_info(name: str, **said: Any) -> PeerInfo:
    """A peer of this name that says the rest of itself; where it is reached, it listens."""
    address = said.get("address", _PEER.address)
    return replace(
        _PEER, **{"id": name, "name": name, "own_name": name, "addresses": (address,), **said}
    )
