"""Peers as they describe themselves, without any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.protocol.description import HostedModel
from edge.protocol.peer_info import PeerInfo

_PEER = PeerInfo(
    credentials=None,
    id="p",
    epoch=1,
    name="p",
    address="127.0.0.1:1",
    reached_at="127.0.0.1:1",
    addresses=(),
    backend="ort",
    software="0",
    processor="CPU",
    threads=1,
    memory_bytes=1 << 40,
    floor_bytes=0,
    free_bytes=1 << 40,
    free_now_bytes=1 << 40,
    model_free_bytes=1 << 40,
    host="h",
    identity="i",
    arithmetic="a",
    kv_memory_bytes=None,
    kv_disk_bytes=0,
    kv_prefix_bytes=0,
    kv_beginnings_bytes=0,
    models=(),
)


def peer_info(name: str, **said: Any) -> PeerInfo:
    """A peer of this name that says the rest of itself; where it is reached, it listens."""
    address = said.get("address", _PEER.address)
    named = {"id": name, "name": name, "own_name": name}
    if "free_bytes" in said:
        said.setdefault("free_now_bytes", said["free_bytes"])
    return replace(_PEER, **{**named, "addresses": (address,), "reached_at": address, **said})


def hosted_model(**said: Any) -> HostedModel:
    """A model that a peer has loaded."""
    model = HostedModel(
        name="m",
        dtype="int4",
        stage=0,
        rank=0,
        sums="links",
        bytes=1,
        buffer_bytes=0,
        streamed_bytes=0,
        host_bytes=0,
        kv_bytes=0,
        kv_host_bytes=0,
        kv_disk_bytes=0,
        user="u",
    )
    return replace(model, **said)
