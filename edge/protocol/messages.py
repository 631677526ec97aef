"""What coordinator and peers say to each other: every frame, in the order of use.

A session is one shard of one loaded model for one coordinator. Calls name the record that answers
them. Both sides send `alive` a few times a second (see heartbeat.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from edge.errors import ProtocolError
from edge.kernels.sampling.logprobs import Logprobs
from edge.offload import PIECE_BYTES, Manifest
from edge.partition import MOST_SHARDS
from edge.protocol.assignment import Assignment
from edge.protocol.description import PeerDescription
from edge.protocol.error_codec import Failed
from edge.protocol.frame_codec import (
    ANSWER,
    SMALL,
    Call,
    Event,
    Payload,
    Post,
    Raw,
    long_json,
    table,
)
from edge.protocol.kept_files import Keep
from edge.protocol.lease import Lease
from edge.protocol.measurements import Glance, MemoryRate, Probe, Profile
from edge.protocol.step import (
    MAX_CHUNK_TOKENS,
    MAX_REQUESTS,
    FinishReason,
    SamplingTerms,
    Step,
)
from edge.protocol.step_times import ExpectedStep, ShardTimes
from edge.protocol.token_logprobs import (
    MOST_BYTES_OF_A_TOKEN,
    read_logprobs,
    write_logprobs,
)
from edge.protocol.topology import Place, Seat
from edge.transport.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, FrameLimits

MAX_MANIFEST_BYTES = 16 << 20
"""One of 400 layers with 64 tensors each takes 3.7 MB, and 700 GB of weights in pieces 11 MB."""

MOST_COPY_BYTES = 1 << 20
"""Largest copy of keys and values: tokens that are chosen meanwhile wait until it is sent."""

_MOST_PIECES = MAX_MANIFEST_BYTES // 64
"""That such a manifest can name."""

_LARGE_HEADER = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=SMALL.payload_bytes)
"""A plan for hundreds of devices, or a step of a thousand requests with their terms."""

_ANSWER_LIMITS = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_MANIFEST_BYTES)
"""Which call it answers is not known when they are asked for."""

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


SECRET_BYTES = 32

MOST_TRUSTED = 16
"""Devices whose beginnings of prompts a session may find: each costs a hash for each block."""


def _secret(payload: Buffer) -> bytes:
    if len(payload) != SECRET_BYTES:
        raise ProtocolError(f"a secret of {len(payload)} bytes")
    return bytes(payload)


_Secret = Annotated[bytes, Payload(lambda value: value, _secret)]

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
    rows_agree: bool
    """A token's row is the same, to the last bit, however many others are in its step, as long as
    they are an even number together."""
    batches_agree: bool
    """So is a single token's of a request, whichever others' are in its step, or none."""


# Calls: who is there, and how fast (MemoryRate, Profile … Glance: measurements.py; Keep:
# kept_files.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Call[PeerDescription]):
    """Who are you, what do you have, what do you run?"""

    kind, limit_s = "describe", 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMemory(Call[PeerDescription]):
    """Stay under another budget; what is loaded goes on."""

    kind, limit_s = "set_memory", 900.0
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver(Call[Done]):
    """End what earlier terms of this run have open, and refuse them from now on. And what this
    term has open on a connection that was cut off."""

    kind, limit_s = "take_over", 60.0
    lease: Lease


# Calls: a model comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Call[Missing]):
    """Which pieces of this shard do you lack? What is there is hashed, if it was written to."""

    kind, limit_s = "offer", 3600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_MANIFEST_BYTES)
    manifest: _SentManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Call[Done]):
    """Store this piece of a shard that was offered."""

    kind, limit_s = "piece", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=PIECE_BYTES)
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
    limits = _LARGE_HEADER
    assignment: Assignment
    lease: Lease
    """Sessions of earlier terms of the same run end first."""
    prefix_secret: _Secret
    """Secret of the owner of beginnings of prompts that are kept. Forgotten with the session."""
    prefixes_of: Annotated[tuple[str, ...], Meta(max_length=MOST_TRUSTED)] = ()
    """Beginnings of ids of other devices with the same secret: what they have left is taken."""
    expected: ExpectedStep | None = None
    """What its steps should take; a peer that takes longer says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A shard that is linked with its neighbours, and ready."""

    kv_digest: str | None
    """Digest of how it keeps keys and values: those of shards that are cut alike and have the same
    digest may be exchanged. None: it hands none out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect(Call[Connected]):
    """Link up with the other shards, and prepare with them what shards prepare together."""

    kind, limit_s = "connect", 900.0
    limits = _LARGE_HEADER
    session: str
    places: Annotated[Mapping[Seat, Place], Meta(max_length=MOST_SHARDS)]


# Posts, in the order in which every peer gets them, and the events that tell their outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrefix(Post):
    """Find the beginning of this prompt, in memory or on disk. Every shard reports."""

    kind = "match_prefix"
    limits = FrameLimits(header_bytes=SMALL.header_bytes)
    session: str
    request: str
    salt: str | None = None
    """Only what was left with the same one is found."""
    source: str | None = None
    """A request whose first `tokens` are the prompt's, too; None: none is in memory."""
    tokens: int = 0
    moves: bool = False
    """The source's cache is this request's from now on; else it stays, too."""
    prompt: Raw
    """See `fields.token_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatched(Event):
    """The first `tokens` tokens of the prompt need not be computed."""

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
    """Compute. The sampler reports `tokens`, `logits` or `states`."""

    kind = "step"
    limits = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_PAYLOAD_BYTES)
    session: str
    step: Step
    terms: Annotated[Mapping[str, SamplingTerms], Meta(max_length=MAX_REQUESTS)] = field(
        default_factory=dict
    )
    """Terms of each request whose first step this is and that wants tokens; others want logits."""
    masked: Annotated[tuple[str, ...], Meta(max_length=MAX_REQUESTS)] = ()
    """Requests whose next token not every token may be."""
    masks: Raw = b""
    """Which may be, for each of these; see `edge.protocol.token_masks`. Of no consequence but in
    the last stage."""

    def __post_init__(self) -> None:
        if not self.terms.keys() <= {entry.request for entry in self.step.entries}:
            raise ValueError("terms of a request that is not in the step")
        if self.masked and self.step.run > 1:
            raise ValueError("a run whose next tokens were known beforehand")
        wanting = {entry.request for entry in self.step.entries if entry.logit_rows}
        if len(set(self.masked)) < len(self.masked) or not wanting.issuperset(self.masked):
            raise ValueError("masks of requests that want no token in the step")
        if self.step.states and (self.terms or self.masked):
            raise ValueError("tokens of a request that wants hidden states")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedTokens:
    """Which tokens of a request a copy is of."""

    request: str
    first: int
    tokens: Annotated[int, Meta(ge=1, le=MAX_CHUNK_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRows(Event):
    """Copies of the keys and values of some tokens of answers, where the assignment asks for them:
    one part after the other, [tokens, bytes]. Of a token they are the keys, then the values, of
    each layer, [heads, bytes].
    """

    kind = "kv_rows"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    parts: Annotated[tuple[CopiedTokens, ...], Meta(max_length=MAX_REQUESTS)]
    rows: Raw

    def each(self) -> Iterator[tuple[CopiedTokens, Buffer]]:
        """The parts, each with its rows. Raises ValueError where they do not share them evenly."""
        rows, tokens = memoryview(self.rows), sum(part.tokens for part in self.parts)
        if not tokens or len(rows) % tokens:
            raise ValueError(f"{len(rows)} bytes of keys and values of {tokens} tokens")
        start, token_bytes = 0, len(rows) // tokens
        for part in self.parts:
            stop = start + part.tokens * token_bytes
            yield part, rows[start:stop]
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class PutKv(Call[Done]):
    """Let the request have these keys and values, of tokens that follow what it has, as `KvRows`
    has them.

    Answered once it has them, so that few of them wait in memory.
    """

    kind, limit_s = "put_kv", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    request: str
    first: int
    tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_CHUNK_TOKENS)]
    """Their ids."""
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """A token of each entry of a step that wants one. A run gives tokens several times."""

    kind = "tokens"
    limits = FrameLimits(
        header_bytes=SMALL.header_bytes, payload_bytes=MAX_REQUESTS * MOST_BYTES_OF_A_TOKEN
    )
    tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_REQUESTS)]
    ends: Annotated[tuple[FinishReason | None, ...], Meta(max_length=MAX_REQUESTS)]
    """Why each of them is its request's last, if it is."""
    last: bool
    """The step, or the run, is over."""
    chosen_s: float
    """When they were chosen, by the sampler's monotonic clock."""
    logprobs: Annotated[tuple[Logprobs | None, ...], Payload(write_logprobs, read_logprobs)] = ()
    """Log probabilities of each token, where its request wants them; empty where none does."""

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.tokens):
            raise ValueError("of each token it must be known whether its reply ends")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError("logprobs of other tokens than were chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Event):
    """Rows of logits of a step's request, as float32."""

    kind = "logits"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class States(Event):
    """Rows of hidden states of a step's request, as float32."""

    kind = "states"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
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
class SaveState(Post):
    """Where layers have states in place of keys and values: copy that of a request to a place, for
    who begins with the same tokens. What was there is gone."""

    kind = "save_state"
    session: str
    request: str
    tokens: int
    """That the request has now."""
    place: int
    """One of the limits' `saved_states`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Post):
    """The request is over: free it."""

    kind = "finish"
    limits = FrameLimits(header_bytes=SMALL.header_bytes)
    session: str
    request: str
    kept_tokens: int = 0
    """Tokens of its cache that stay for who begins with them, until it is finished again."""
    answer: Raw = b""
    """Those of them that follow the prompt that was matched; see `fields.token_bytes`."""


# Calls: a model is asked, and goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Call[ShardTimes]):
    """Where did time go since you were last asked? Told between two steps."""

    kind, limit_s = "measure", 180.0
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gram:
    """A matrix of float32."""

    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Call[Gram]):
    """What was summed up of the inputs of one of your runs (`edge.weights.observation`)?"""

    kind, limit_s = "observed", 180.0
    session: str
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Call[Done]):
    """Free everything of the session.

    parks: whoever lost another shard of the plan loads this one again, perhaps: the peer may keep
    it ready for that, until a moment after this connection ends, as long as nothing else needs the
    memory.
    """

    kind, limit_s = "close", 10.0
    session: str
    parks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Event):
    """Somebody waits at the link to the shard of this seat, and for a while nothing has arrived."""

    kind = "waits"
    stage: int
    rank: int
    received: int
    """Messages that came over this link so far."""
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLink(Post):
    """Tell how much was sent over the link to the shard of this seat: `LinkSent`."""

    kind = "ask_link"
    session: str
    stage: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSent(Event):
    """How many messages were begun to be sent over the link to the shard of this seat."""

    kind = "link_sent"
    stage: int
    rank: int
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Event):
    """This peer's user has stopped it: it goes once your sessions are closed, or soon after."""

    kind = "leaving"


FRAMES = table(
    (
        Describe, MemoryRate, Profile, Probe, Glance, SetMemory, TakeOver, Keep,
        Offer, Piece, Seal, Open, Connect,
        MatchPrefix, PrefixMatched, Reserve, Reserved, RunStep, KvRows, PutKv, Tokens, Logits,
        States, YieldRun, SwapOut, SwappedOut, SaveState, Finish, Measure, Observed, Close, Leaving,
        Failed, Waits, AskLink, LinkSent,
    )
)  # fmt: skip
"""By kind."""


def limits_of(kind: str) -> FrameLimits:
    """How large a frame of this kind, which is any text, may be."""
    if kind == ANSWER:
        return _ANSWER_LIMITS
    return FRAMES[kind].limits if kind in FRAMES else SMALL
