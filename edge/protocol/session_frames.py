"""Frames of a session: a shard is loaded, linked with its neighbours, measured and freed.

A session is one shard of one loaded model for one coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.errors import ProtocolError
from edge.partition import MOST_SHARDS
from edge.protocol.assignment import Assignment
from edge.protocol.frame_codec import LARGE_HEADER, Call, Done, Event, Payload, Post, Raw
from edge.protocol.lease import Lease
from edge.protocol.step_times import ExpectedStep, ShardTimes, TokenSteps
from edge.protocol.topology import Place, Seat
from edge.transport.frame import Buffer

SECRET_BYTES = 32

MOST_TRUSTED = 16
"""Most devices whose prefix caches a session may use. Each costs a hash for each block."""

MADE_UP_WEIGHTS = "made up"
"""In place of a manifest's digest: random weights, which a peer makes itself for a measurement."""


def _secret(payload: Buffer) -> bytes:
    if len(payload) != SECRET_BYTES:
        raise ProtocolError(f"the secret has {len(payload)} bytes, and it must have {SECRET_BYTES}")
    return bytes(payload)


_Secret = Annotated[bytes, Payload(lambda value: value, _secret)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The shard is loaded."""

    weight_bytes: int
    rows_agree: bool
    """A row is the same, to the last bit, in every step with an even number of tokens of its
    request."""
    batches_agree: bool
    """The row of a single token is the same whichever other requests are in its step."""
    mixes: bool
    """A step may have a chunk of a prompt beside tokens of other requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Call[Opened]):
    """Reserve memory and load the shard."""

    kind, limit_s = "open", 3600.0
    limits = LARGE_HEADER
    assignment: Assignment
    lease: Lease
    """Sessions of earlier terms of the same run end first."""
    prefix_secret: _Secret
    """Secret under which prefix caches are kept and found. The peer forgets it with the session."""
    prefixes_of: Annotated[tuple[str, ...], Meta(max_length=MOST_TRUSTED)] = ()
    """Prefixes of ids of other devices with the same secret, whose prefix caches may be used."""
    expected: ExpectedStep | None = None
    """Predicted times of its steps. A peer that takes longer reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The shard is linked with its neighbours and ready."""

    kv_digest: str | None
    """Digest of its form of keys and values. Shards with equal cuts and equal digests may exchange
    them. None: it hands none out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect(Call[Connected]):
    """Link up with the other shards, and do the preparations that shards do together."""

    kind, limit_s = "connect", 900.0
    limits = LARGE_HEADER
    session: str
    places: Annotated[Mapping[Seat, Place], Meta(max_length=MOST_SHARDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Call[ShardTimes]):
    """Ask where the peer's time went since the last question. Answered between two steps."""

    kind, limit_s = "measure", 180.0
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSteps(Call[TokenSteps]):
    """Ask how long decode steps have taken since the shard was loaded. Answered between two
    steps."""

    kind, limit_s = "count_steps", 180.0
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gram:
    """A float32 matrix."""

    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Call[Gram]):
    """Ask for the summed inputs of one of the shard's observed runs
    (`edge.weights.observation`)."""

    kind, limit_s = "observed", 180.0
    session: str
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Call[Done]):
    """Free everything of the session.

    parks: the coordinator has lost another shard of the plan and may load this one again. The peer
    may keep the program ready until a moment after this connection ends, as long as nothing else
    needs the memory.
    """

    kind, limit_s = "close", 10.0
    session: str
    parks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Event):
    """This shard waits at the link to the shard of that seat, and nothing has arrived for a
    while."""

    kind = "waits"
    stage: int
    rank: int
    received: int
    """Messages received over this link so far."""
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLink(Post):
    """Ask how much was sent over the link to the shard of that seat; `LinkSent` answers."""

    kind = "ask_link"
    session: str
    stage: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSent(Event):
    """Number of messages whose sending over the link to that seat has begun."""

    kind = "link_sent"
    stage: int
    rank: int
    sent: int
