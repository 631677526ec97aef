"""Frames about prefix caches: a prompt is matched with them, and peers exchange stored pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.frame_codec import MOST_COPY_BYTES, SMALL, Call, Done, Event, Post, Raw
from edge.transport.frame import FrameLimits

MOST_PREFIX_PIECES = 4096
MOST_PREFIX_TOKENS = 256
"""Most pieces, and tokens of each, that are read and given at once."""

MOST_POINTS = 256
"""Most numbers of tokens that a shard reports, at which it can restore states of one prompt."""


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
