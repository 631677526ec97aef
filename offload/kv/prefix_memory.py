"""Prefix cache in memory: blocks of keys and values, found by the tokens that they follow from.

Like `prefix_store.py`, without a disk. Blocks beyond the limit are evicted at once, by their cost
to compute again (`eviction_order.py`). Each block has its own pages, so eviction frees its memory.
Keys of blocks are made with the owner's secret, so blocks need no encryption in this process.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.kv.eviction_order import EvictionOrder
from edge.system.pages import private_memory

MOST_BLOCKS = 2048
"""Most blocks. Each is a separate mapping, of which a process may have 65,530."""

_ALIGNED_BYTES = 64

Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    arrays: tuple[NDArray[Any], ...]
    """Views of the block's pages, which are freed with the last view."""
    num_bytes: int
    owner: str


class PrefixMemory:
    """A prefix cache in memory, thread-safe. It has no room until `limit` is called."""

    def __init__(self, *, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._limit_bytes = 0
        self._owner_limits: dict[str, int] = {}
        self._mutex = threading.Lock()
        self._blocks: dict[str, _Block] = {}
        """Blocks by key."""
        self._order = EvictionOrder()
        self._taken: Counter[str] = Counter()
        """Bytes by owner."""

    @property
    def used_bytes(self) -> int:
        with self._mutex:
            return self._taken.total()

    def limit(self, num_bytes: int) -> None:
        """Set the room; blocks beyond it are evicted before this returns."""
        with self._mutex:
            self._limit_bytes = num_bytes
            self._shrink(num_bytes)

    def limit_owner(self, owner: str, num_bytes: int) -> None:
        """Set the room of one owner, within the room of all."""
        with self._mutex:
            self._owner_limits[owner] = num_bytes
            self._shrink(num_bytes, owner)

    def most_blocks(self, arrays: Arrays, owner: str = "") -> int:
        """Number of blocks like this one that fit if all others are evicted."""
        with self._mutex:
            return min(self._most_blocks, self._room_bytes(owner) // _mapped_bytes(arrays))

    def has(self, key: str) -> bool:
        with self._mutex:
            return key in self._blocks

    def use(self, keys: Collection[str], cost: float = 0.0) -> None:
        """Mark blocks as used now, the first as the most recent, since later ones need it.
        Unknown keys are ignored. cost: of computing the last block again; earlier ones are worth no
        less."""
        with self._mutex:
            for key in reversed(tuple(keys)):
                if (block := self._blocks.get(key)) is not None:
                    self._order.use(key, cost / block.num_bytes)

    def read(self, key: str, take: Callable[[Arrays], None]) -> bool:
        """Call `take` with the block's arrays, which are valid until it returns. Returns False,
        without a call, if there is no such block."""
        with self._mutex:
            block = self._blocks.get(key)
            if block is None:
                return False
            take(block.arrays)
            return True

    def put(self, key: str, arrays: Arrays, owner: str = "", cost: float = 0.0) -> bool:
        """Store a copy, and mark it as used now. Returns False if there is no room.

        owner: id of a device, whose own blocks are evicted if it has too many. cost: see `use`.
        """
        size = _mapped_bytes(arrays)
        with self._mutex:
            if key in self._blocks:
                self._order.forget(key)
                self._drop(key)
            if size > self._room_bytes(owner) or not self._most_blocks:
                return False
            if owner in self._owner_limits:
                self._shrink(self._owner_limits[owner] - size, owner)
            self._shrink(self._limit_bytes - size)
            while len(self._blocks) >= self._most_blocks:
                self._evict(self._order.first())
            try:
                copies = tuple(_copies(arrays, private_memory(size)))
            except OSError:  # the system has less memory than the limit
                return False
            self._blocks[key] = _Block(arrays=copies, num_bytes=size, owner=owner)
            self._order.use(key, cost / size)
            self._taken[owner] += size
            return True

    def _evict(self, key: str) -> None:
        self._order.evict(key)
        self._drop(key)

    def _drop(self, key: str) -> None:
        block = self._blocks.pop(key)
        self._taken[block.owner] -= block.num_bytes
        if not self._taken[block.owner]:
            del self._taken[block.owner]

    def _room_bytes(self, owner: str) -> int:
        """Most bytes of one owner's blocks."""
        return min(self._limit_bytes, self._owner_limits.get(owner, sys.maxsize))

    def _shrink(self, num_bytes: int, owner: str | None = None) -> None:
        """Evict the blocks with the least worth, of one owner or of all, down to `num_bytes`."""
        left_bytes = (self._taken.total() if owner is None else self._taken[owner]) - num_bytes
        if left_bytes <= 0:
            return
        for key in self._order:
            if owner is None or self._blocks[key].owner == owner:
                left_bytes -= self._blocks[key].num_bytes
                self._evict(key)
            if left_bytes <= 0:
                break


def _mapped_bytes(arrays: Arrays) -> int:
    """Bytes of the pages for copies of these arrays; at least one page, also for empty ones."""
    size = sum(map(_place_bytes, arrays))
    return max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE


def _place_bytes(array: NDArray[Any]) -> int:
    return math.ceil(array.nbytes / _ALIGNED_BYTES) * _ALIGNED_BYTES


def _copies(arrays: Arrays, pages: mmap.mmap) -> Iterator[NDArray[Any]]:
    flat = np.frombuffer(pages, np.uint8)
    begin = 0
    for array in arrays:
        copy = flat[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        begin += _place_bytes(array)
        yield copy
