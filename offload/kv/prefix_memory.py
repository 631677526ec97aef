"""Prefix cache in memory: keys, values and states, found by the tokens that they follow from.

Like `prefix_store.py`, without a disk. Records beyond the limit are evicted at once, by their cost
to compute again (`eviction_order.py`). Each record has its own pages, so eviction frees its memory.
Keys of records are made with the owner's secret, so records need no encryption in this process.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.kv.prefix_records import Pieces, PrefixPart, PrefixRecords, as_bytes
from edge.system.pages import private_memory

MOST_BLOCKS = 2048
"""Most records. Each is a separate mapping, of which a process may have 65,530."""


class PrefixMemory(PrefixRecords):
    """A prefix cache in memory, thread-safe. It has no room until `limit` is called."""

    def __init__(self, *, most_blocks: int = MOST_BLOCKS) -> None:
        super().__init__()
        self._most_blocks = most_blocks
        self._limit_bytes = 0
        self._contents: dict[str, tuple[NDArray[np.uint8], tuple[int, ...]]] = {}
        """Bytes of all pieces, and the size of each, by id."""
        self._equal_sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """The sizes of records, each once: most records have the same."""

    def limit(self, num_bytes: int) -> None:
        """Set the room; records beyond it are evicted before this returns."""
        with self._mutex:
            self._limit_bytes = num_bytes
            self._shrink(num_bytes)

    def limit_owner(self, owner: str, num_bytes: int) -> None:
        """Set the room of one owner, within the room of all."""
        with self._mutex:
            self._owner_limits[owner] = num_bytes
            self._shrink(num_bytes, owner)

    def most_blocks(self, pieces: Pieces, owner: str = "") -> int:
        """Number of records like this one that fit if all others are evicted."""
        with self._mutex:
            room_bytes = min(self._limit_bytes, self._owner_limit(owner))
            return min(self._most_blocks, room_bytes // _mapped_bytes(pieces))

    def put(
        self, key: str, pieces: Pieces, secret: bytes = b"", owner: str = "", cost: float = 0.0
    ) -> bool:
        size, part = _mapped_bytes(pieces), PrefixPart.of(tuple(pieces))
        id = part.record(key)
        with self._mutex:
            self._remove(id)
            if size > min(self._limit_bytes, self._owner_limit(owner)) or not self._most_blocks:
                return False
            self._shrink(self._owner_limit(owner) - size, owner)
            self._shrink(self._limit_bytes - size)
            while len(self._sizes) >= self._most_blocks:
                self._remove(self._order.first(), is_evicted=True)
            try:
                content = np.frombuffer(private_memory(size), np.uint8)
            except OSError:  # the system has less memory than the limit
                return False
            begin = 0
            for array in pieces.values():
                content[begin : begin + array.nbytes] = as_bytes(array)
                begin += array.nbytes
            sizes = tuple(array.nbytes for array in pieces.values())
            self._contents[id] = content, self._equal_sizes.setdefault(sizes, sizes)
            self._names[part.digest] = part.names
            self._enter(id, owner, size, cost)
            return True

    def _fill(self, id: str, into: Mapping[str, NDArray[Any]], _secret: bytes) -> bool:
        if id not in self._contents:
            return False
        content, sizes = self._contents[id]
        begin = 0
        for name, size in zip(self._names_of(id, b""), sizes, strict=True):
            if (array := into.get(name)) is not None:
                if array.nbytes != size:
                    return False
                array[...] = content[begin : begin + size]
            begin += size
        return True

    def _sizes_of(self, id: str, secret: bytes) -> Mapping[str, int]:
        return dict(zip(self._names_of(id, secret), self._contents[id][1], strict=True))

    def _delete(self, id: str) -> None:
        del self._contents[id]


def _mapped_bytes(pieces: Pieces) -> int:
    """Bytes of the pages for copies of these arrays; at least one page, also for empty ones."""
    size = sum(each.nbytes for each in pieces.values())
    return max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE
