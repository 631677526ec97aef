"""Frames that bring the weights of a shard to a peer's disk, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.offload import PIECE_BYTES, Manifest
from edge.protocol.frame_codec import SMALL, Call, Done, Payload, Raw, long_json
from edge.transport.frame import FrameLimits

MAX_MANIFEST_BYTES = 16 << 20
"""Size limit of a manifest. 400 layers of 64 tensors take 3.7 MB; 700 GB of weights in pieces, 11
MB."""

_MOST_PIECES = MAX_MANIFEST_BYTES // 64
"""Most pieces that such a manifest can name."""

_Digests = Annotated[
    tuple[str, ...], long_json(Annotated[tuple[str, ...], Meta(max_length=_MOST_PIECES)])
]
_SentManifest = Annotated[
    Manifest,
    Payload(
        lambda manifest: manifest.to_json().encode(),
        lambda payload: Manifest.from_json(bytes(payload)),
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The digests of the pieces that a peer lacks, in the order of the shard."""

    digests: _Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Call[Missing]):
    """Ask which pieces of a shard the peer lacks. Files that were written to are hashed again."""

    kind, limit_s = "offer", 3600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_MANIFEST_BYTES)
    manifest: _SentManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Call[Done]):
    """Store a piece of an offered shard."""

    kind, limit_s = "piece", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=PIECE_BYTES)
    manifest: str
    """Its digest."""
    digest: str
    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal(Call[Done]):
    """Report that every piece is sent, so the shard is complete on the peer's disk."""

    kind, limit_s = "seal", 600.0
    manifest: str
