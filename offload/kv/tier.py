"""The interface of a tier for keys and values outside the pool, and a tier in memory."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edge.offload.errors import StoreFullError

Rows = NDArray[Any]
"""[num_kv_heads, tokens, elements] of one layer's keys or values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayer:
    """The shape of a token's keys and values in one layer."""

    num_kv_heads: int
    row_bytes: int
    """Bytes of a token's key (or value) of one head."""

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The largest keys and values of a request, equal for all requests of a shard."""

    layers: tuple[KVLayer, ...]
    context_tokens: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(layer.token_bytes for layer in self.layers)


class KVPlace(Protocol):
    """One request's keys and values in a tier, by layer. They only grow."""

    def tokens(self, layer: int) -> int:
        """Number of the layer's tokens in this place."""

    def reserve(self, tokens: int) -> None:
        """Reserve room for `tokens` in every layer, for `append`.

        Raises StoreFullError if there is none, StoreError if the disk fails; earlier contents stay.
        """

    def append(self, layer: int, keys: Rows, values: Rows) -> None:
        """Append tokens to a layer.

        Raises StoreFullError if there is no room, StoreError if the disk fails; earlier contents
        stay.
        """

    def read(self, layer: int, keys: Rows, values: Rows) -> None:
        """Fill both arrays with all `tokens` of the layer.

        May be called for one layer during an append to another. Raises StoreCorruptError for other
        bytes than were appended, StoreError if the disk fails.
        """


class KVTier(Protocol):
    """The places of requests, by name. Used from one thread, except `KVPlace.read`."""

    @property
    def used_bytes(self) -> int:
        """Bytes written or reserved."""

    @property
    def written_bytes(self) -> int:
        """Bytes of all that was ever appended."""

    def place(self, request: str, shape: KVShape) -> KVPlace:
        """The request's place, which is made if it is missing."""

    def drop(self, request: str) -> None:
        """Drop a request's place. Unknown requests are ignored."""

    def close(self) -> None: ...


class Allowance:
    """A limit of bytes and their use. on_change: called with bytes taken, or freed (< 0)."""

    def __init__(
        self, limit_bytes: int, on_change: Callable[[int], None] = lambda _num_bytes: None
    ) -> None:
        self._on_change = on_change
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.written_bytes = 0
        """Bytes of all that was ever appended to places."""

    def take(self, num_bytes: int) -> None:
        """Take bytes. Raises StoreFullError beyond the limit."""
        missing = self.used_bytes + num_bytes - self.limit_bytes
        if missing > 0:
            raise StoreFullError(
                f"keys and values of {num_bytes:,} bytes do not fit: they exceed the limit of "
                f"{self.limit_bytes:,} bytes by {missing:,}; raise the limit",
                bytes_missing=missing,
            )
        self.used_bytes += num_bytes
        self._on_change(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        self._on_change(-num_bytes)


class Room:
    """The part of an allowance that one place has taken, before it is written."""

    def __init__(self, shape: KVShape, allowance: Allowance) -> None:
        self._allowance = allowance
        self._token_bytes = [layer.token_bytes for layer in shape.layers]
        self._tokens = [0] * shape.num_layers

    @contextlib.contextmanager
    def growing(self, layers: Iterable[int], tokens: int) -> Iterator[int]:
        """Take the bytes that these layers lack for `tokens`, and yield their number. An error in
        the body undoes it. Raises StoreFullError beyond the limit.
        """
        grown = [each for each in layers if self._tokens[each] < tokens]
        lacking = sum((tokens - self._tokens[each]) * self._token_bytes[each] for each in grown)
        self._allowance.take(lacking)
        try:
            yield lacking
        except BaseException:
            self._allowance.give_back(lacking)
            raise
        for layer in grown:
            self._tokens[layer] = tokens

    def wrote(self, layer: int, tokens: int) -> None:
        """Record that N tokens were appended to the layer."""
        self._allowance.written_bytes += tokens * self._token_bytes[layer]

    def give_back(self) -> None:
        """Return all bytes of the place."""
        self._allowance.give_back(
            sum(count * size for count, size in zip(self._tokens, self._token_bytes, strict=True))
        )


class MemoryKVTier:
    """A tier in host memory, for devices with less memory than their host."""

    def __init__(self, limit_bytes: int) -> None:
        self._allowance = Allowance(limit_bytes)
        self._places: dict[str, _MemoryPlace] = {}

    @property
    def used_bytes(self) -> int:
        return self._allowance.used_bytes

    @property
    def written_bytes(self) -> int:
        return self._allowance.written_bytes

    def place(self, request: str, shape: KVShape) -> KVPlace:
        return self._places.setdefault(request, _MemoryPlace(shape, self._allowance))

    def drop(self, request: str) -> None:
        place = self._places.pop(request, None)
        if place is not None:
            place.room.give_back()

    def close(self) -> None:
        for request in list(self._places):
            self.drop(request)


class _MemoryPlace:
    def __init__(self, shape: KVShape, allowance: Allowance) -> None:
        self.room = Room(shape, allowance)
        self._tokens = [0] * shape.num_layers
        self._rows: list[list[tuple[Rows, Rows]]] = [[] for _ in range(shape.num_layers)]

    def tokens(self, layer: int) -> int:
        return self._tokens[layer]

    def reserve(self, tokens: int) -> None:
        with self.room.growing(range(len(self._tokens)), tokens):
            pass

    def append(self, layer: int, keys: Rows, values: Rows) -> None:
        tokens = self._tokens[layer] + keys.shape[1]
        with self.room.growing([layer], tokens):
            self._rows[layer].append((keys.copy(), values.copy()))
        self._tokens[layer] = tokens
        self.room.wrote(layer, keys.shape[1])

    def read(self, layer: int, keys: Rows, values: Rows) -> None:
        check_size(self._tokens[layer], keys, values)
        first = 0
        for some_keys, some_values in self._rows[layer]:
            last = first + some_keys.shape[1]
            keys[:, first:last], values[:, first:last] = some_keys, some_values
            first = last


def check_size(tokens: int, keys: Rows, values: Rows) -> None:
    """Raises ValueError unless both have room for exactly `tokens`."""
    if keys.shape[1] != tokens or values.shape[1] != tokens:
        raise ValueError(f"{tokens} tokens are kept, not {keys.shape[1]} and {values.shape[1]}")


def checksum(content: memoryview, before: int) -> int:
    """The checksum after `before` and this. It detects a disk's errors, not attacks."""
    return zlib.crc32(content, before)
