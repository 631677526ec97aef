"""The frames between coordinator and peers, in the order of use.

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
from edge.models.pictures import MAX_TILE_BYTES
from edge.models.towers.part import TowerPart
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
from edge.protocol.graph_frames import ClosePart, OpenPart, ProfilePart
from edge.protocol.kept_files import Keep
from edge.protocol.lease import Lease
from edge.protocol.measurements import Glance, MemoryRate, Probe, Profile, Prove
from edge.protocol.step import (
    MAX_CHUNK_TOKENS,
    MAX_REQUESTS,
    MOST_DRAFTED,
    MOST_IN_TURN,
    FinishReason,
    Guesses,
    SamplingTerms,
    Step,
)
from edge.protocol.step_times import ExpectedStep, ShardTimes, TokenSteps
from edge.protocol.token_logprobs import (
    MOST_BYTES_OF_A_TOKEN,
    read_logprobs,
    write_logprobs,
)
from edge.protocol.topology import Place, Seat
from edge.transport.frame import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, FrameLimits
from edge.weights.formats import WeightFormat

MAX_MANIFEST_BYTES = 16 << 20
"""Size limit of a manifest. 400 layers of 64 tensors take 3.7 MB; 700 GB of weights in pieces, 11
MB."""

MOST_COPY_BYTES = 1 << 20
"""Largest copy of keys and values. Tokens chosen meanwhile wait until it is sent."""

_MOST_PIECES = MAX_MANIFEST_BYTES // 64
"""Most pieces that such a manifest can name."""

_LARGE_HEADER = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=SMALL.payload_bytes)
"""Size limit of a plan for hundreds of devices, or of a step of a thousand requests with their
terms."""

_ANSWER_LIMITS = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_MANIFEST_BYTES)
"""Size limit of an answer. Its call is not known yet when the limit is needed."""

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

MOST_PREFIX_PIECES = 4096
MOST_PREFIX_TOKENS = 256
"""Most pieces, and tokens of each, that are read and given at once."""

MOST_POINTS = 256
"""Most numbers of tokens that a shard reports, at which it can restore states of one prompt."""

MOST_TRUSTED = 16
"""Most devices whose prefix caches a session may use. Each costs a hash for each block."""


def _secret(payload: Buffer) -> bytes:
    if len(payload) != SECRET_BYTES:
        raise ProtocolError(f"the secret has {len(payload)} bytes, and it must have {SECRET_BYTES}")
    return bytes(payload)


_Secret = Annotated[bytes, Payload(lambda value: value, _secret)]

MADE_UP_WEIGHTS = "made up"
"""In place of a manifest's digest: random weights, which a peer makes itself for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The empty answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The digests of the pieces that a peer lacks, in the order of the shard."""

    digests: _Digests


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


# Calls: descriptions and rates of peers (MemoryRate … Glance: measurements.py; Keep: kept_files.py)


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


# Calls: a model is sent and loaded


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Call[Opened]):
    """Reserve memory and load the shard."""

    kind, limit_s = "open", 3600.0
    limits = _LARGE_HEADER
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
    limits = _LARGE_HEADER
    session: str
    places: Annotated[Mapping[Seat, Place], Meta(max_length=MOST_SHARDS)]


# Calls: a draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDrafts(Call[Done]):
    """Have a loaded model guess the tokens of a larger one, for the device that samples those and
    links up next."""

    kind, limit_s = "serve_drafts", 60.0
    session: str
    device: str | None
    """Its id; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A draft model that serves drafts: where it is, and its sizes."""

    place: Place
    session: str
    context_tokens: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    ahead: bool
    """It drafts on while steps run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDrafts(Call[Done]):
    """Have the sampler link up with a draft model, and ask it from then on, or ask none."""

    kind, limit_s = "ask_drafts", 60.0
    session: str
    source: DraftSource | None
    """None: there is none any more."""


# Calls: a tower, which reads pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTower(Call[Done]):
    """Reserve memory and load a tower, or a part of one, whose weights are sealed on the peer."""

    kind, limit_s = "open_tower", 3600.0
    limits = _LARGE_HEADER
    session: str
    part: TowerPart
    weight_format: WeightFormat
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutHidden(Call[Done]):
    """Rows of the hidden state of a tile, for a part of a tower that is not the first: those from
    `first` on. They come in order; with row 0 another tile begins."""

    kind, limit_s = "put_hidden", 60.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    height: int
    """Patches."""
    width: int
    first: int
    rows: Raw
    """Float32 [rows, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTile(Call[Done]):
    """Read a tile, and keep its rows until they are taken or the next tile is read. A part that is
    not the first has no patches, but all of the hidden state."""

    kind, limit_s = "read_tile", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_TILE_BYTES)
    session: str
    height: int
    """Patches."""
    width: int
    patches: Raw
    """See `Tile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRows:
    """Rows of a tile, float32 [rows, hidden]; of a part that is not the last, its hidden state
    [patches, hidden]."""

    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRows(Call[TileRows]):
    """Rows [first, last) of the tile that was read last."""

    kind, limit_s = "take_rows", 60.0
    session: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTower(Call[Done]):
    """Free the tower's memory."""

    kind, limit_s = "close_tower", 60.0
    session: str


# Posts, which every peer gets in the same order, and the events that report their outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrefix(Post):
    """Find a prefix of this prompt in a cache, in memory or on disk. Every shard reports."""

    kind = "match_prefix"
    limits = FrameLimits(header_bytes=SMALL.header_bytes)
    session: str
    request: str
    salt: str | None = None
    """Only caches of the same salt are found."""
    source: str | None = None
    """A request that begins with the same `tokens` tokens; None: none is in memory."""
    tokens: int = 0
    """Without a source, one of the `points` that every shard reported for this prompt."""
    moves: bool = False
    """The cache of the source belongs to this request from now on; else it is copied."""
    prompt: Raw
    """See `fields.token_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatched(Event):
    """The first `tokens` tokens of the prompt need not be computed."""

    kind = "prefix_matched"
    request: str
    tokens: int
    points: Annotated[tuple[int, ...], Meta(max_length=MOST_POINTS)] = ()
    """If layers have states: the numbers of tokens at which stored states can be restored, in
    order."""
    stored: Annotated[tuple[int, ...], Meta(max_length=MOST_POINTS)] = ()
    """Up to so many tokens of the prompt, the device has stored something for any shard: one
    number, or if layers have states, those at which it has some, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrefix:
    """What a device has stored of a matched prompt for a shard: uint32 [3, pieces], in the order of
    `edge.weights.cache_layout`. First the tokens of keys and values, then the bytes of one of them,
    then the bytes of a state at the point, plus one; 0: none."""

    pieces: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPrefix(Call[HeldPrefix]):
    """Ask what the device has stored of a matched prompt for the shard of that seat, of this model.
    point: where its states are wanted; 0: none."""

    kind, limit_s = "ask_prefix", 60.0
    session: str
    request: str
    stage: int
    rank: int
    point: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPieces:
    """Bytes of pieces one after the other, without those that are not stored any more."""

    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrefix(Call[PrefixPieces]):
    """Read pieces of a shard that the device has stored of tokens [first, last) of a matched
    prompt, and with `has_states` of states at `last`."""

    kind, limit_s = "read_prefix", 60.0
    session: str
    request: str
    stage: int
    rank: int
    first: int
    """A multiple of MOST_PREFIX_TOKENS."""
    last: int
    has_states: bool
    pieces: Annotated[tuple[int, ...], Meta(max_length=MOST_PREFIX_PIECES)]
    """Numbers of the pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrefix(Call[Done]):
    """Give a shard pieces that another device has read. With `is_whole` they are the last ones of
    these tokens, and the device stores them with those that it has itself, as far as there is
    room."""

    kind, limit_s = "put_prefix", 60.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    request: str
    first: int
    last: int
    has_states: bool
    is_whole: bool
    pieces: Annotated[tuple[int, ...], Meta(max_length=MOST_PREFIX_PIECES)]
    content: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Post):
    """Reserve room on disk for this many tokens of the request. Every shard reports."""

    kind = "reserve"
    session: str
    request: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Event):
    """The room is reserved; or `why_not` says why not."""

    kind = "reserved"
    request: str
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRows(Post):
    """Rows of pictures, for the tokens of a request from `position` on: float32
    [tokens, (1 + picture_layers) · hidden]. Shards that look up embeddings or have some of the
    model's first `picture_layers` layers get them before the step that computes them."""

    kind = "picture_rows"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    request: str
    position: int
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Post):
    """Compute a step. The sampler reports tokens, logits or states."""

    kind = "step"
    limits = FrameLimits(header_bytes=MAX_HEADER_BYTES, payload_bytes=MAX_PAYLOAD_BYTES)
    session: str
    step: Step
    terms: Annotated[Mapping[str, SamplingTerms], Meta(max_length=MAX_REQUESTS)] = field(
        default_factory=dict
    )
    """Terms of the requests that want tokens and whose first step this is; others want logits."""
    masked: Annotated[tuple[str, ...], Meta(max_length=MAX_REQUESTS)] = ()
    """Requests with a token mask."""
    masks: Raw = b""
    """The masks of these requests, as many of each as the step gives tokens at most; see
    `edge.protocol.token_masks`. Used in the last stage only."""

    def __post_init__(self) -> None:
        if not self.terms.keys() <= {entry.request for entry in self.step.entries}:
            raise ValueError("terms has a request that is not in the step")
        if self.masked and self.step.run > 1 + self.step.drafted:
            raise ValueError("a run of several steps cannot have token masks")
        wanting = {entry.request for entry in self.step.entries if entry.logit_rows}
        if len(set(self.masked)) < len(self.masked) or not wanting.issuperset(self.masked):
            raise ValueError("masked has a request twice, or one that wants no token in the step")
        if self.step.states and (self.terms or self.masked):
            raise ValueError("a step for hidden states cannot have terms or token masks")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedTokens:
    """The tokens of a request that a copy covers."""

    request: str
    first: int
    tokens: Annotated[int, Meta(ge=1, le=MAX_CHUNK_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRows(Event):
    """Copies of keys and values of some tokens of answers, if the assignment asks for them.

    rows: one part after the other, [tokens, bytes]. A token has the keys and then the values of
    each layer, [heads, bytes].
    """

    kind = "kv_rows"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    parts: Annotated[tuple[CopiedTokens, ...], Meta(max_length=MAX_REQUESTS)]
    rows: Raw

    def each(self) -> Iterator[tuple[CopiedTokens, Buffer]]:
        """Each part with its rows. Raises ValueError if the rows cannot be divided evenly."""
        rows, tokens = memoryview(self.rows), sum(part.tokens for part in self.parts)
        if not tokens or len(rows) % tokens:
            raise ValueError(
                f"{len(rows)} bytes of keys and values cannot be divided among {tokens} tokens"
            )
        start, token_bytes = 0, len(rows) // tokens
        for part in self.parts:
            stop = start + part.tokens * token_bytes
            yield part, rows[start:stop]
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class PutKv(Call[Done]):
    """Restore keys and values of the next tokens of a request, in the form of `KvRows`.

    Answered once they are in the cache, so that few of them wait in memory.
    """

    kind, limit_s = "put_kv", 600.0
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MOST_COPY_BYTES)
    session: str
    request: str
    first: int
    tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_CHUNK_TOKENS)]
    """Token ids."""
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """One token for each entry of a step that wants one. A run reports tokens several times.

    A step that verifies a draft reports all its tokens at once: the accepted guesses, and the token
    after them.
    """

    kind = "tokens"
    limits = FrameLimits(
        header_bytes=SMALL.header_bytes, payload_bytes=MAX_REQUESTS * MOST_BYTES_OF_A_TOKEN
    )
    tokens: Annotated[tuple[int, ...], Meta(max_length=MAX_REQUESTS)]
    ends: Annotated[tuple[FinishReason | None, ...], Meta(max_length=MAX_REQUESTS)]
    """Why each token is the last of its request; None: it is not."""
    last: bool
    """The step, or the run, is over."""
    chosen_s: float
    """Time of the choice, by the sampler's monotonic clock."""
    logprobs: Annotated[tuple[Logprobs | None, ...], Payload(write_logprobs, read_logprobs)] = ()
    """Log probabilities of each token if its request wants them; empty if none does."""
    drafted: Annotated[int, Meta(ge=0, le=MOST_DRAFTED)] = 0
    """Tokens of the draft that the step verified."""
    together: bool = False
    """The rows of the step were those of several tokens of the answer."""
    pairs: bool = False
    """The row of the newest token is to be computed in a step of an even number of rows."""
    guesses: Annotated[tuple[Guesses, ...], Meta(max_length=MOST_IN_TURN)] = ()
    """For each entry of the step, unless there are none; only once it is over."""

    def __post_init__(self) -> None:
        if self.drafted and not 1 <= len(self.tokens) <= 1 + self.drafted:
            raise ValueError("a step gives one token more than guesses of its draft are right")
        if self.drafted and not self.together:
            raise ValueError("a draft without several rows")
        if any(self.ends[:-1]) and self.drafted:
            raise ValueError("tokens follow the last one")
        if len(self.ends) != len(self.tokens):
            raise ValueError("ends needs one entry for each token")
        if self.guesses and not (self.last and len(self.guesses) == self._num_entries):
            raise ValueError("guesses come with the last token of each request")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError("logprobs needs one entry for each token")

    @property
    def _num_entries(self) -> int:
        return 1 if self.drafted else len(self.tokens)

    @property
    def pairs_of_each(self) -> list[bool]:
        """`pairs` for each token, also where its request has guesses."""
        found = [self.pairs or bool(each.tokens) for each in self.guesses]
        found = found or [self.pairs] * self._num_entries
        return found * (len(self.tokens) if self.drafted else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Event):
    """Float32 logits of a step's request, row after row."""

    kind = "logits"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class States(Event):
    """Float32 hidden states of a step's request, row after row."""

    kind = "states"
    limits = FrameLimits(header_bytes=SMALL.header_bytes, payload_bytes=MAX_PAYLOAD_BYTES)
    rows: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRun(Post):
    """End the run after its current token, because other requests wait."""

    kind = "yield_run"
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut(Post):
    """Swap out: move a request's keys and values to disk until its next step. Every shard
    reports."""

    kind = "swap_out"
    session: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut(Event):
    """The keys and values are on disk; or `why_not` says why not."""

    kind = "swapped_out"
    request: str
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState(Post):
    """Copy a request's state to a place, for requests with the same prefix. It replaces the state
    there. Only for layers with states in place of keys and values."""

    kind = "save_state"
    session: str
    request: str
    tokens: int
    """Tokens that the request has now."""
    place: int
    """Index of the place, below `saved_states` of the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Post):
    """The request is over: free its cache."""

    kind = "finish"
    limits = FrameLimits(header_bytes=SMALL.header_bytes)
    session: str
    request: str
    kept_tokens: int = 0
    """First tokens of its cache that stay as a prefix cache, until the request is finished
    again."""
    answer: Raw = b""
    """The kept tokens after the matched prompt; see `fields.token_bytes`."""


# Calls: a loaded model is measured, and freed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Event):
    """The peer's user has stopped it. It ends once the coordinator's sessions are closed, or
    soon."""

    kind = "leaving"


FRAMES = table(
    (
        Describe, MemoryRate, Profile, Prove, Probe, Glance, SetMemory, TakeOver, Keep,
        Offer, Piece, Seal, Open, Connect, ServeDrafts, AskDrafts,
        OpenTower, PutHidden, ReadTile, TakeRows, CloseTower,
        OpenPart, ProfilePart, ClosePart,
        MatchPrefix, PrefixMatched, AskPrefix, ReadPrefix, PutPrefix, Reserve, Reserved,
        PictureRows, RunStep,
        KvRows, PutKv, Tokens, Logits, States, YieldRun, SwapOut, SwappedOut, SaveState, Finish,
        Measure, CountSteps, Observed, Close, Leaving, Failed, Waits, AskLink, LinkSent,
    )
)  # fmt: skip
"""Frames by kind."""


def limits_of(kind: str) -> FrameLimits:
    """Size limit of a frame of this kind. The kind may be any text."""
    if kind == ANSWER:
        return _ANSWER_LIMITS
    return FRAMES[kind].limits if kind in FRAMES else SMALL
