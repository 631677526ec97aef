"""The disk cache of a device, as it describes it, and the call that asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.fields import Printable
from edge.protocol.frame_codec import SMALL, Call, long_json
from edge.transport.frame import FrameLimits

MOST_FILES = 4096
"""The most files that are reported or removed at once, the least recently used first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFiles:
    """One folder of the cache."""

    kind: Printable
    """Its kind of content; see `edge/memory/disk_cache.py`."""
    name: Printable
    """The name by which it can be removed: kind/folder."""
    model: Printable | None
    """The model that it belongs to; None where that is unknown or private to another device."""
    bytes: int
    unused_s: float
    """Seconds since its last use."""
    in_use: bool


_Names = Annotated[tuple[Printable, ...], Meta(max_length=MOST_FILES)]
_Files = Annotated[tuple[KeptFiles, ...], Meta(max_length=MOST_FILES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllKept:
    """The content of the cache."""

    files: Annotated[tuple[KeptFiles, ...], long_json(_Files)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Call[AllKept]):
    """Ask for the cached weights that this coordinator may see. First remove those named in
    `remove` that belong to it and are not in use."""

    kind, limit_s = "keep", 60.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=1 << 20)
    remove: Annotated[tuple[str, ...], long_json(_Names)] = ()
