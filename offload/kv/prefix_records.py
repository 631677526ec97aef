"""Records of a prefix cache: found by key and content, evicted by their cost.

A record is what one shard has of a block of tokens: pieces by name, such as the keys of one head in
one layer. A shard of another plan finds the records of one key that together have its own pieces.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.offload.kv.eviction_order import EvictionOrder

Pieces = Mapping[str, NDArray[Any]]
"""Arrays by name."""

PART_DIGITS = 16


class PrefixPart(NamedTuple):
    """The names of the pieces of a record, and their digest."""

    names: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, names: Sequence[str]) -> PrefixPart:
        digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
        return cls(tuple(names), digest[:PART_DIGITS])

    def record(self, key: str) -> str:
        """The id of the record of this key with these pieces."""
        return f"{key}-{self.digest}"


class PrefixRecords(ABC):
    """The records of one place, thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Bytes by id: the key, and the digest of the names."""
        self._of_key: dict[str, list[str]] = {}
        """Ids by key."""
        self._names: dict[str, tuple[str, ...]] = {}
        """Known names by their digest."""
        self._order = EvictionOrder()
        self._owners: dict[str, str] = {}
        """Ids of the owners' devices, if not empty, by id of a record."""
        self._owner_limits: dict[str, int] = {}
        self._taken: Counter[str] = Counter()
        """Bytes by owner."""

    @property
    def used_bytes(self) -> int:
        with self._mutex:
            return self._taken.total()

    def find(self, key: str, part: PrefixPart, secret: bytes = b"") -> tuple[str, ...]:
        """The ids of records of this key that together have all pieces of `part`; empty if some are
        missing."""
        with self._mutex:
            ids = tuple(self._of_key.get(key, ()))
            own = part.record(key)
            if own in ids:
                return (own,)
            missing, found = set(part.names), []
            for id in ids:
                if not missing.isdisjoint(names := self._names_of(id, secret)):
                    missing.difference_update(names)
                    found.append(id)
            return () if missing else tuple(found)

    def use(self, ids: Collection[str], cost: float = 0.0) -> None:
        """Mark records as used now, the first as the most recent, since later ones need it.
        Unknown ids are ignored. cost: of computing the last block again; earlier ones are worth no
        less."""
        with self._mutex:
            for id in reversed(tuple(ids)):
                if id in self._sizes:
                    self._order.use(id, cost / self._sizes[id])

    def read(self, ids: Collection[str], into: Pieces, secret: bytes = b"") -> bool:
        """Fill arrays with the pieces of these records. Returns False, with the arrays' contents
        undefined, if there are not all.

        A record that is damaged, or has pieces of other sizes, is removed.
        """
        with self._mutex:
            left = dict(into)
            for id in ids:
                names = self._names_of(id, secret) if id in self._sizes else ()
                wanted = {name: left.pop(name) for name in names if name in left}
                if not wanted and id in self._sizes:
                    continue
                filled = {name: as_bytes(each) for name, each in wanted.items()}
                if not self._fill(id, filled, secret):
                    self._remove(id)
                    return False
                for name, array in wanted.items():
                    if not array.flags.c_contiguous:  # some states are columns of an array
                        array[...] = filled[name].view(array.dtype).reshape(array.shape)
            return not left

    def has(self, key: str) -> bool:
        """Whether there is any record of this key."""
        with self._mutex:
            return key in self._of_key

    def sizes(self, key: str, secret: bytes = b"") -> dict[str, int]:
        """Bytes of all pieces of this key."""
        with self._mutex:
            sizes: dict[str, int] = {}
            for id in tuple(self._of_key.get(key, ())):
                sizes |= self._sizes_of(id, secret)
            return sizes

    def take(
        self, key: str, names: Collection[str], secret: bytes = b""
    ) -> dict[str, NDArray[np.uint8]]:
        """Copies of those of these pieces that are stored."""
        sizes = self.sizes(key, secret)
        into = {name: np.empty(sizes[name], np.uint8) for name in names if name in sizes}
        return into if self.read(tuple(self._of_key.get(key, ())), into, secret) else {}

    @abstractmethod
    def put(
        self, key: str, pieces: Pieces, secret: bytes = b"", owner: str = "", cost: float = 0.0
    ) -> bool:
        """Store copies, and mark the record as used now. Returns False if there is no room.

        owner: id of a device, whose own records are evicted if it has too many. cost: see `use`.
        """

    @abstractmethod
    def _fill(self, id: str, into: Mapping[str, NDArray[np.uint8]], secret: bytes) -> bool:
        """Fill these arrays. Returns False for a record that is damaged or has other sizes."""

    @abstractmethod
    def _sizes_of(self, id: str, secret: bytes) -> Mapping[str, int]:
        """Bytes of a record's pieces; empty if it cannot be read."""

    @abstractmethod
    def _delete(self, id: str) -> None:
        """Free the record's memory or file."""

    def _names_of(self, id: str, secret: bytes) -> tuple[str, ...]:
        """The names of a record's pieces; empty if it cannot be read, and then it is removed."""
        return self._names[id[-PART_DIGITS:]]

    def _enter(self, id: str, owner: str, size: int, cost: float = 0.0) -> None:
        """Add a record to the tables, as used now."""
        self._sizes[id] = size
        self._of_key.setdefault(_key(id), []).append(id)
        self._order.use(id, cost / size)
        self._taken[owner] += size
        if owner:
            self._owners[id] = owner

    def _remove(self, id: str, *, is_evicted: bool = False) -> None:
        """Remove a record; an unknown id is ignored."""
        if id not in self._sizes:
            return
        (self._order.evict if is_evicted else self._order.forget)(id)
        self._delete(id)
        self._of_key[_key(id)].remove(id)
        if not self._of_key[_key(id)]:
            del self._of_key[_key(id)]
        self._taken[self._owners.pop(id, "")] -= self._sizes.pop(id)

    def _owner_limit(self, owner: str) -> int:
        return self._owner_limits.get(owner, sys.maxsize)

    def _shrink(self, num_bytes: int, owner: str | None = None) -> bool:
        """Evict the records with the least worth, of one owner or of all, down to `num_bytes`.
        Returns whether any was evicted."""
        left_bytes = (self._taken.total() if owner is None else self._taken[owner]) - num_bytes
        has_evicted = False
        for id in self._order if left_bytes > 0 else ():
            if owner is None or self._owners.get(id, "") == owner:
                left_bytes -= self._sizes[id]
                self._remove(id, is_evicted=True)
                has_evicted = True
            if left_bytes <= 0:
                break
        return has_evicted


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a contiguous array, as a view; of another one, a copy of them."""
    if array.ndim == 1 and array.dtype == np.uint8 and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _key(id: str) -> str:
    return id[: -PART_DIGITS - 1]
