"""Frames about a peer itself: what it is, its memory, and its end.

The frames that measure it are in measurements.py, those about its cached files in kept_files.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.protocol.description import PeerDescription
from edge.protocol.frame_codec import Call, Done, Event
from edge.protocol.lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Call[PeerDescription]):
    """Ask a peer to describe itself, its memory and its models."""

    kind, limit_s = "describe", 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMemory(Call[PeerDescription]):
    """Change the memory budget of the peer. Loaded models go on."""

    kind, limit_s = "set_memory", 900.0
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver(Call[Done]):
    """End the sessions of earlier terms of this run, and refuse those terms from now on. Also end
    sessions of this term on connections that were cut off."""

    kind, limit_s = "take_over", 60.0
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Event):
    """The peer's user has stopped it. It ends once the coordinator's sessions are closed, or
    soon."""

    kind = "leaving"
