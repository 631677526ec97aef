"""What a device keeps on disk for the next time, as it says itself, and the call that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.fields import Printable
from edge.protocol.frame_codec import SMALL, Call, long_json
from edge.transport.frame import FrameLimits

MOST_FILES = 4096
"""That are told, or removed, at once; the least recently used first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFiles:
    """A folder of a cache."""

    kind: Printable
    """What it is; see `edge/memory/disk_cache.py`."""
    name: Printable
    """By which it can be removed: kind/folder."""
    model: Printable | None
    """The model that it is of; None where that is not known, or another device's affair."""
    bytes: int
    unused_s: float
    """How long nobody has used it."""
    in_use: bool


_Names = Annotated[tuple[Printable, ...], Meta(max_length=MOST_FILES)]
_Files = Annotated[tuple[KeptFiles, ...], Meta(max_length=MOST_FILES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllKept:
    """What there is."""

    files: Annotated[tuple[KeptFiles, ...], long_json(_Files)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Call[AllKept]):
    """What do you keep of the weights that I may see? Remove these of mine first, if nobody uses
    them."""

    kind, limit_s = "keep", 60.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=1 << 20)
    remove: Annotated[tuple[str, ...], long_json(_Names)] = ()
