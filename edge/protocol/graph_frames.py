"""Frames of parts of graphs: opened from a sealed upload, timed and closed.

Runs come over a link of the part's own (edge/protocol/part_runs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.frame_codec import Call, Raw

PACKED = 2
"""Times the bytes of weights that a part takes: ONNX Runtime keeps matrices packed, too."""
PROCESS_BYTES = 96 << 20
"""What the process of a part takes before it loads anything: Python, numpy and ONNX Runtime. 70 MiB
were measured."""
MOST_STAGES = 4096
PROFILE_BYTES = 16 << 20
"""What the times of nodes take."""
_Bytes = Annotated[int, Meta(ge=0, le=1 << 42)]
_Session = Annotated[str, Meta(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOpened:
    """The part is loaded."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDone:
    """The empty answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart(Call[PartOpened]):
    """Reserve memory for a part of a graph and load it in a process of its own."""

    kind, limit_s = "open_part", 900.0
    session: _Session
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    """The name of the graph's file, for people."""
    stage: Annotated[int, Meta(ge=0, lt=MOST_STAGES)] = 0
    """Its place in the plan, for people."""
    manifest_digest: str
    buffer_bytes: _Bytes
    """Memory of the part's process for tensors, beside the weights."""
    held_bytes: _Bytes
    """Memory of the peer for inputs that wait, and for results that are not yet taken."""
    run_limit_s: Annotated[float, Meta(gt=0, le=3600)]
    """Seconds after which the process of a run is ended."""
    profile: bool = False
    """Nodes are timed until `ProfilePart`."""
    plain: bool = False
    """The graph is computed node by node as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartProfile:
    """JSON: "nodes", the name, microseconds and kinds of the outputs of each node that has run; and
    "types" of tensors by name, where the part is computed as it is written."""

    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePart(Call[PartProfile]):
    """End the timing of nodes."""

    kind, limit_s = "profile_part", 600.0
    session: _Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePart(Call[PartDone]):
    """End the part's process and free its memory."""

    kind, limit_s = "close_part", 30.0
    session: _Session
