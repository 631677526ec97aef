"""Frames of parts of graphs: opened from a sealed upload, fed, and their results taken.

Tensors travel as blobs (edge/graphs/tensors.py), in pieces of `BLOB_PIECE_BYTES`. A peer reads none
of them itself: the process that computes the part does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from edge.protocol.frame_codec import SMALL, Call, Raw
from edge.transport.frame import FrameLimits

BLOB_PIECE_BYTES = 8 << 20
MOST_BLOB_BYTES = 1 << 34
PACKED = 2
"""Times the bytes of weights that a part takes: ONNX Runtime keeps matrices packed, too."""
PROCESS_BYTES = 96 << 20
"""What the process of a part takes before it loads anything: Python, numpy and ONNX Runtime. 70 MiB
were measured."""
PROFILE_BYTES = 16 << 20
"""What the times of nodes take."""
MOST_RUNS = 4
"""Runs of one part that a peer keeps at once: fed, computed or not yet taken."""

_Bytes = Annotated[int, Meta(ge=0, le=1 << 42)]
_Run = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Session = Annotated[str, Meta(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOpened:
    """The part is loaded."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDone:
    """The empty answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPiece:
    """A piece of a result. The run is over when its last piece was taken."""

    total_bytes: Annotated[int, Meta(ge=0, le=MOST_BLOB_BYTES)]
    computed_s: Annotated[float, Meta(ge=0, lt=1e9)]
    """Seconds from the begin of its computation to its end, by the peer's clock."""
    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart(Call[PartOpened]):
    """Reserve memory for a part of a graph and load it in a process of its own."""

    kind, limit_s = "open_part", 900.0
    session: _Session
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    """The name of the graph's file, for people."""
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
class FeedPart(Call[PartDone]):
    """Give a piece of the inputs of a run. With the last one, the run waits for its turn."""

    kind, limit_s = "feed_part", 600.0
    limits: ClassVar[FrameLimits] = FrameLimits(
        header_bytes=SMALL.header_bytes, payload_bytes=BLOB_PIECE_BYTES
    )
    session: _Session
    run: _Run
    total_bytes: Annotated[int, Meta(ge=1, le=MOST_BLOB_BYTES)]
    offset: _Bytes
    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeResult(Call[PartPiece]):
    """Wait for the end of a run, and take a piece of its results. Raises RequestError with the
    cause, which names the node, if it failed."""

    kind, limit_s = "take_result", 4000.0
    session: _Session
    run: _Run
    offset: _Bytes


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
