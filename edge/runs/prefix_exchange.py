"""Prefix exchange: a device that lacks its part of a stored prefix gets it from one that has it.

After a change of the plan, or when a device has joined, some shards find a prefix and others do
not. The coordinator asks what each device has stored for the others, and moves what is missing if
that is predicted to be faster than computing the prompt. Then the prefix is looked up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError, ProtocolError
from edge.protocol.frame_codec import MOST_COPY_BYTES
from edge.protocol.peer_info import gather_all
from edge.protocol.prefix_frames import (
    MOST_PREFIX_PIECES,
    MOST_PREFIX_TOKENS,
    AskPrefix,
    HeldPrefix,
    PrefixMatched,
    PrefixPieces,
    PutPrefix,
    ReadPrefix,
)
from edge.protocol.topology import Seat
from edge.runs.connections import Connections
from edge.scheduling.prefixes import FEWEST_TOKENS
from edge.transport.frame import Buffer

Pieces = NDArray[np.uint32]

_MOST_STATE_BYTES = 128 << 20
"""Most bytes of states and windows that move: a device holds them once more until all are there."""

_MOST_TRIALS = 3
"""Numbers of tokens that are tried, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """Predicted rates, by which moving is compared with computing, and the kind of model."""

    bytes_per_s: float
    """The rate of the slowest link that pieces may take."""
    prompt_tokens_per_s: float
    has_states: bool

    def pays(self, num_bytes: int, tokens: int) -> bool:
        """Whether moving so many bytes, to this device and from it, takes less than computing."""
        return 2 * num_bytes / self.bytes_per_s < tokens / self.prompt_tokens_per_s


@dataclass(frozen=True, slots=True)
class _Move:
    """Pieces that one shard lacks, and the seats of devices that have them, by piece."""

    seat: Seat
    tokens: int
    has_states: bool
    holders: Mapping[int, Seat]
    row_bytes: Pieces
    state_bytes: Pieces

    @property
    def num_bytes(self) -> int:
        return sum(
            self.tokens * int(self.row_bytes[each]) + int(self.state_bytes[each])
            for each in self.holders
        )

    def calls(self, session: str, request: str) -> Iterator[tuple[Seat, ReadPrefix, int, bool]]:
        """The device that is asked, for what, the bytes of its answer, and whether these are the
        last ones of their tokens."""
        for first in range(0, self.tokens, MOST_PREFIX_TOKENS):
            last = min(first + MOST_PREFIX_TOKENS, self.tokens)
            has_states = self.has_states and last == self.tokens
            groups: list[tuple[Seat, list[int], int]] = []
            for piece, holder in sorted(self.holders.items(), key=lambda each: each[1]):
                size = (last - first) * int(self.row_bytes[piece])
                if not self.row_bytes[piece]:
                    if not has_states:
                        continue
                    size = int(self.state_bytes[piece])
                if (
                    not groups
                    or groups[-1][0] != holder
                    or groups[-1][2] + size > MOST_COPY_BYTES
                    or len(groups[-1][1]) == MOST_PREFIX_PIECES
                ):
                    groups.append((holder, [], 0))
                groups[-1][1].append(piece)
                groups[-1] = (*groups[-1][:2], groups[-1][2] + size)
            for number, (holder, pieces, size) in enumerate(groups):
                read = ReadPrefix(
                    session=session,
                    request=request,
                    stage=self.seat[0],
                    rank=self.seat[1],
                    first=first,
                    last=last,
                    has_states=has_states,
                    pieces=tuple(pieces),
                )
                yield holder, read, size, number == len(groups) - 1


class PrefixExchange:
    """Moves stored pieces between the devices of one run."""

    def __init__(self, connections: Connections, facts: ExchangeFacts) -> None:
        self._connections, self._facts = connections, facts

    async def even_out(self, request: str, found: Mapping[Seat, PrefixMatched]) -> bool:
        """Give devices what they lack of a prefix that others have stored. Returns whether anything
        was moved. Raises EdgeError if a device refuses or is lost."""
        stored = set().union(*(each.stored for each in found.values()))
        if self._facts.has_states:
            known = max(set.intersection(*(set(each.points) for each in found.values())), default=0)
        else:
            known = min(each.tokens for each in found.values())
        useful = (each for each in stored if each - known >= FEWEST_TOKENS)
        for tokens in sorted(useful, reverse=True)[:_MOST_TRIALS]:
            lacking = [
                seat
                for seat, each in found.items()
                if (tokens not in each.points if self._facts.has_states else each.tokens < tokens)
            ]
            moves = [await self._move(request, seat, list(found), tokens) for seat in lacking]
            gained = min((move.tokens for move in moves if move is not None), default=0) - known
            if None in moves or gained < FEWEST_TOKENS:
                continue
            num_bytes = sum(move.num_bytes for move in moves if move is not None)
            if not self._facts.pays(num_bytes, gained):
                continue
            await gather_all(self._carry_out(request, move) for move in moves if move is not None)
            return True
        return False

    async def _move(
        self, request: str, seat: Seat, seats: Sequence[Seat], tokens: int
    ) -> _Move | None:
        """What this shard lacks of a prefix, as long as others have all of it; None if they do
        not."""
        point = tokens if self._facts.has_states else 0
        held = dict(zip(seats, await gather_all(
            self._held(each, request, seat, point) for each in seats
        ), strict=True))  # fmt: skip
        own = held.pop(seat)
        others = {each: told for each, told in held.items() if told.shape == own.shape}
        if not others:
            return None
        most = np.max([own, *others.values()], axis=0)
        is_row = most[1] > 0
        if (most[0][~is_row] > 0).any():
            return None  # tokens of no bytes
        if point:
            if not most[2].all():
                return None
            missing = np.flatnonzero(own[2] == 0)
        else:
            tokens = min(tokens, int(most[0].min(initial=tokens)))
            missing = np.flatnonzero(own[0] < tokens)
        which = 2 if point else 0
        holders = {
            int(piece): next(
                each
                for each, told in others.items()
                if told[which, piece] >= (1 if point else tokens)
            )
            for piece in missing
        }
        state_bytes = np.where(is_row | (most[2] == 0), 0, most[2] - 1).astype(np.uint32)
        row_bytes = most[1]
        largest = max(
            int(row_bytes.max(initial=0)) * MOST_PREFIX_TOKENS, int(state_bytes.max(initial=0))
        )
        moved = sum(int(state_bytes[each]) for each in holders)
        if not holders or largest > MOST_COPY_BYTES or moved > _MOST_STATE_BYTES:
            return None
        return _Move(seat, tokens, point > 0, holders, row_bytes, state_bytes)

    async def _held(self, seat: Seat, request: str, of: Seat, point: int) -> Pieces:
        call = AskPrefix(
            session=self._connections.session,
            request=request,
            stage=of[0],
            rank=of[1],
            point=point,
        )
        told: HeldPrefix = await self._connections.call(seat, call)
        if len(told.pieces) % 12:
            raise ProtocolError(f"{len(told.pieces)} bytes for pieces of a prefix")
        return np.frombuffer(told.pieces, "<u4").reshape(3, -1)

    async def _carry_out(self, request: str, move: _Move) -> None:
        """While a device stores pieces, the next ones are read from another."""
        calls = [*move.calls(self._connections.session, request)]
        reading = asyncio.create_task(self._read(calls[0]))
        try:
            for (_holder, read, _size, is_last), following in zip_longest(calls, calls[1:]):
                content = await reading
                if following is not None:
                    reading = asyncio.create_task(self._read(following))
                put = PutPrefix(
                    session=read.session,
                    request=request,
                    first=read.first,
                    last=read.last,
                    has_states=read.has_states,
                    is_whole=is_last,
                    pieces=read.pieces,
                    content=content,
                )
                await self._connections.call(move.seat, put)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, asked: tuple[Seat, ReadPrefix, int, bool]) -> Buffer:
        holder, read, size, _is_last = asked
        answer: PrefixPieces = await self._connections.call(holder, read)
        if len(answer.content) != size:
            raise EdgeError("a stored prefix is gone")
        return answer.content
