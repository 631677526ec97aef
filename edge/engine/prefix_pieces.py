"""Pieces of stored prefixes, for other devices of a plan: what is stored, read, and received.

A device that lacks its part of a prefix gets it from one that has stored it under an earlier plan.
Received pieces become blocks of its prefix cache in memory, so the prefix is found like any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.engine.prefix_cache import MEMORY_BLOCK_TOKENS, PrefixCache
from edge.engine.prefix_keys import STATES
from edge.errors import RequestError
from edge.protocol.frame_codec import MOST_COPY_BYTES
from edge.protocol.prefix_frames import MOST_PREFIX_TOKENS, PutPrefix, ReadPrefix
from edge.weights.cache_layout import piece_names, row_pieces, state_pieces
from edge.weights.layout import ShardLayout

Bytes = NDArray[np.uint8]


class StoredPieces:
    """The pieces in the places of one prefix cache. Used by the compute thread."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._received: tuple[tuple[str, int, int], dict[str, Bytes]] = (("", 0, 0), {})
        """Pieces of the tokens that are being received: request, first and last."""

    def held(self, request: str, layout: ShardLayout, point: int) -> NDArray[np.uint32]:
        """See `HeldPrefix`."""
        chain = self._cache.chain(request)
        names, num_rows = _names(layout)
        numbers = {name: number for number, name in enumerate(names)}
        tokens, row_bytes, at_point = told = np.zeros((3, len(names)), np.uint32)
        wants_states = self._cache.has_states and 0 < point <= len(chain)
        for records, size in self._cache.places:
            going = set(names[:num_rows])
            for end in range(size, len(chain) + 1, size):
                sizes = records.sizes(chain.own_key(size, end), self._cache.secret)
                going &= sizes.keys()
                if not going:
                    break
                for name in going:
                    number = numbers[name]
                    tokens[number] = max(tokens[number], end)
                    row_bytes[number] = sizes[name] // size
        for records, size in self._cache.places if wants_states else ():
            rest = point % size
            sizes = records.sizes(chain.own_key(STATES, point), self._cache.secret)
            for name in numbers.keys() & sizes.keys():
                number = numbers[name]
                if number >= num_rows:
                    at_point[number] = 1 + sizes[name]
                elif tokens[number] >= point - rest:
                    at_point[number] = 1
                    row_bytes[number] = sizes[name] // rest if rest else row_bytes[number]
        return told

    def read(self, call: ReadPrefix, layout: ShardLayout) -> bytes:
        """The bytes of pieces, without those that are not stored. Raises RequestError for tokens
        outside the prompt, unknown numbers, or more than fits into an answer."""
        names, num_rows = _names(layout)
        chosen = _chosen(names, call.pieces)
        found = self._gather(call, chosen, names[num_rows:], most_bytes=MOST_COPY_BYTES)
        return b"".join(found[name].tobytes() for name in chosen if name in found)

    def put(self, call: PutPrefix) -> None:
        """Receive pieces; with the last ones, store blocks of them and of those that the device has
        itself. Raises RequestError for other tokens, numbers or sizes."""
        request, first, last, content = call.request, call.first, call.last, call.content
        has_states = self._check(call)
        sizes = self._cache.piece_bytes(last - first, last)
        names, num_rows = _names(self._cache.layout)
        chosen = _chosen(names, call.pieces)
        if sum(sizes[name] for name in chosen) != len(content):
            raise RequestError(f"{len(content)} bytes for {len(chosen)} pieces of a prefix")
        if self._received[0] != (request, first, last):
            self._received = ((request, first, last), {})
        received, begin = self._received[1], 0
        for name in chosen:
            received[name] = np.frombuffer(content, np.uint8, sizes[name], begin).copy()
            begin += sizes[name]
        if not call.is_whole:
            return
        self._received = (("", 0, 0), {})
        others = [name for name in names if name not in received]
        received |= self._gather(call, others, names[num_rows:])
        rows = names[:num_rows]
        wanted = names if has_states else rows
        if any(len(received.get(name, b"")) != sizes[name] for name in wanted):
            return
        by_token = {name: received[name].reshape(last - first, -1) for name in rows}
        size = MEMORY_BLOCK_TOKENS
        for end in range(first + size, last + 1, size) if rows else ():
            block = {
                name: each[end - size - first : end - first] for name, each in by_token.items()
            }
            self._cache.store(request, size, end, block)
        if has_states:
            rest = last % size
            snapshot = {name: each[last - first - rest :] for name, each in by_token.items()}
            states = {name: received[name] for name in names[num_rows:]}
            self._cache.store(request, STATES, last, snapshot | states)

    def forget(self, request: str) -> None:
        """Drop what was received of a request that is over, without its last pieces."""
        if self._received[0][0] == request:
            self._received = (("", 0, 0), {})

    def _check(self, call: ReadPrefix | PutPrefix) -> bool:
        """Whether states are wanted, of a model that has some."""
        tokens = len(self._cache.chain(call.request))
        most = min(tokens, call.first + MOST_PREFIX_TOKENS)
        if call.first % MOST_PREFIX_TOKENS or not 0 <= call.first < call.last <= most:
            raise RequestError(f"tokens {call.first} to {call.last} of a prompt of {tokens}")
        return call.has_states and self._cache.has_states

    def _gather(
        self,
        call: ReadPrefix | PutPrefix,
        names: Collection[str],
        states: Collection[str],
        *,
        most_bytes: float = math.inf,
    ) -> dict[str, Bytes]:
        """Those of these pieces of which one place has all that is wanted. states: those of them
        that are not of tokens. Raises RequestError for more bytes, before they are read."""
        has_states = self._check(call)
        chain, found = self._cache.chain(call.request), dict[str, Bytes]()
        for records, size in self._cache.places:
            if call.first % size or (call.last % size and not has_states):
                continue
            ends = [(size, end) for end in range(call.first + size, call.last + 1, size)]
            ends += [(STATES, call.last)] if has_states else []
            left = [name for name in names if name not in found]
            sizes = [records.sizes(chain.own_key(*end), self._cache.secret) for end in ends]
            if sum(each.get(name, 0) for each in sizes for name in left) > most_bytes:
                raise RequestError("more pieces of a prefix than an answer has room for")
            parts = [records.take(chain.own_key(*end), left, self._cache.secret) for end in ends]
            for name in left:
                some = parts[-1:] if name in states else parts
                if all(name in part for part in some):
                    found[name] = np.concatenate([part[name] for part in some])
        return found


def _names(layout: ShardLayout) -> tuple[list[str], int]:
    """Names of the pieces of rows, then of states; and the number of the former."""
    rows = piece_names(row_pieces(layout))
    return rows + piece_names(state_pieces(layout, 0)), len(rows)


def _chosen(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    if any(not 0 <= number < len(names) for number in numbers):
        raise RequestError(f"a shard has {len(names)} pieces of a prefix")
    return [names[number] for number in dict.fromkeys(numbers)]
