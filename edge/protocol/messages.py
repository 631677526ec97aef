"""What coordinator and peers say to each other: every frame, in the order of use.

A session is one shard of one loaded model for one coordinator. Calls name the record that answers
them. Both sides send `alive` every few seconds (see heartbeat.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from edge.protocol.assignment import Assignment
from edge.protocol.description import PeerDescription
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import Call, Event, Payload, Post, Raw, long_json, table
from edge.protocol.measurements import Glance, MemoryRate, Probe, Profile
from edge.protocol.step import FinishReason, SamplingTerms, Step
from edge.protocol.step_times import ShardTimes
from edge.protocol.topology import Place, Seat
from offload import Manifest

_Digests = Annotated[tuple[str, ...], long_json(tuple[str, ...])]
_SentManifest = Annotated[
    Manifest,
    Payload(
        lambda manifest: manifest.to_json().encode(),
        lambda payload: Manifest.from_json(bytes(payload)),
    ),
]


MADE_UP_WEIGHTS = "made up"
"""Instead of a manifest's digest: random weights, which a peer makes itself, to measure with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer that says no more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The digests of pieces that a peer lacks, in the order of the shard."""

    digests: _Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A shard that is loaded."""

    weight_bytes: int


# Calls: who is there, and how fast (MemoryRate, Profile … Glance: measurements.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Call[PeerDescription]):
    """Who are you, what do you have, what do you run?"""

    kind, limit_s = "describe", 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMemory(Call[PeerDescription]):
    """Stay under another budget; what is loaded goes on."""

    kind, limit_s = "set_memory", 900.0
    bytes: int


# Calls: a model comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Call[Missing]):
    """Which pieces of this shard do you lack? What is there is hashed, if it was written to."""

    kind, limit_s = "offer", 3600.0
    manifest: _SentManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Call[Done]):
    """Store this piece of a shard that was offered."""

    kind, limit_s = "piece", 600.0
    manifest: str
    """Its digest."""
    digest: str
    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal(Call[Done]):
    """Every piece is sent: the shard is complete on your disk."""

    kind, limit_s = "seal", 600.0
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Call[Opened]):
    """Reserve memory, load the shard."""

    kind, limit_s = "open", 3600.0
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect(Call[Done]):
    """Link up with the other shards, and prepare with them what shards prepare together."""

    kind, limit_s = "connect", 900.0
    session: str
    places: Mapping[Seat, Place]


# Posts, in the order in which every peer gets them, and the events that tell their outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrefix(Post):
    """Find the beginning of this prompt among what is on disk. Every shard reports."""

    kind = "match_prefix"
    session: str
    request: str
    prompt: Raw
    """See `fields.token_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatched(Event):
    """So many tokens of the prompt need not be computed."""

    kind = "prefix_matched"
    request: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Post):
    """Find room on disk for this many of the request's tokens. Every shard reports."""

    kind = "reserve"
    session: str
    request: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Event):
    """There is that room, or why not."""

    kind = "reserved"
    request: str
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Post):
    """Compute. The sampler reports `tokens` or `logits`."""

    kind = "step"
    session: str
    step: Step
    terms: Mapping[str, SamplingTerms] = field(default_factory=dict)
    """Of each request whose first step this is and that wants tokens; others want logits."""

    def __post_init__(self) -> None:
        if not self.terms.keys() <= {entry.request for entry in self.step.entries}:
            raise ValueError("terms of a request that is not in the step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """A token of each entry of a step that wants one. A run gives tokens several times."""

    kind = "tokens"
    tokens: tuple[int, ...]
    ends: tuple[FinishReason | None, ...]
    """Why each of them is its request's last, if it is."""
    last: bool
    """The step, or the run, is over."""
    chosen_s: float
    """When they were chosen, by the sampler's monotonic clock."""

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.tokens):
            raise ValueError("of each token it must be known whether its reply ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Event):
    """Rows of logits of a step's request, as float32."""

    kind = "logits"
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRun(Post):
    """End the run after its current token: others are waiting."""

    kind = "yield_run"
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut(Post):
    """Move keys and values of a request to disk, until its next step. Every shard reports."""

    kind = "swap_out"
    session: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut(Event):
    """They are on disk, or why not."""

    kind = "swapped_out"
    request: str
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Post):
    """Free the request."""

    kind = "finish"
    session: str
    request: str


# Calls: a model is asked, and goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Call[ShardTimes]):
    """Where did time go since you were last asked? Told between two steps."""

    kind, limit_s = "measure", 180.0
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Call[Done]):
    """Free everything of the session."""

    kind, limit_s = "close", 10.0
    session: str


FRAMES = table(
    (
        Describe, MemoryRate, Profile, Probe, Glance, SetMemory,
        Offer, Piece, Seal, Open, Connect,
        MatchPrefix, PrefixMatched, Reserve, Reserved, RunStep, Tokens, Logits,
        YieldRun, SwapOut, SwappedOut, Finish, Measure, Close, Failed,
    )
)  # fmt: skip
"""By kind."""
