"""Frames about keys and values of requests: room for them, copies, swaps and saved states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edge.protocol.frame_codec import MOST_COPY_BYTES, SMALL, Call, Done, Event, Post, Raw
from edge.protocol.step import MAX_CHUNK_TOKENS, MAX_REQUESTS
from edge.transport.frame import Buffer, FrameLimits


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
