"""Prefix cache on disk: blocks of keys and values, found by the tokens that they follow from.

Each block is a file, named by its key and its owner once it is complete. It is sealed with the
owner's secret: records of AES-256-GCM under a key for each file. Damaged, truncated or foreign
blocks count as missing.

Requests that are swapped out take room from blocks. Eviction is by the cost to compute a block
again (`eviction_order.py`); blocks of earlier processes go first, the oldest before others. Each
owner may use only a part of the room.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import struct
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from edge.offload.errors import StoreError
from edge.offload.files.last_use import mark_used
from edge.offload.files.manifest import is_digest
from edge.offload.kv.eviction_order import EvictionOrder
from edge.system.files import forget_pages

_MAGIC = b"edge-kv2"
_SALT_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES
_RECORD_BYTES = 1 << 20
_TAG_BYTES = 16
_NONCE = struct.Struct("!4xQ")
"""The number of a record, which is a safe nonce because a file's key seals nothing else."""
_DRAFT = ".draft-"
_OWNER = re.compile(r"[0-9a-f]{1,64}", re.ASCII)

Arrays = Sequence[NDArray[Any]]


class PrefixStore:
    """A prefix cache in one folder, thread-safe. On a full disk it keeps less."""

    def __init__(
        self, folder: Path, limit_bytes: int, *, owner_limit_bytes: int | None = None
    ) -> None:
        """owner_limit_bytes: most bytes of one owner's blocks.
        Raises StoreError if `folder` cannot be made or read.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._owner_limit_bytes = owner_limit_bytes
        self._guests_bytes = 0
        self._drafts_bytes = 0
        self._mutex = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Sizes by key."""
        self._order = EvictionOrder()
        self._owners: dict[str, str] = {}
        """Owners by key, of blocks that have one."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for draft in folder.glob(f"{_DRAFT}*"):  # of dead processes
                draft.unlink()
            found = [(path.stat(), path) for path in folder.iterdir() if _is_block(path)]
            for status, path in found:
                if status.st_size < _HEAD_BYTES:  # as a loss of power may leave it
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"keys and values cannot be kept in {folder}: {error.strerror}; choose another "
                "folder or repair its permissions"
            ) from error
        whole = [each for each in found if each[0].st_size >= _HEAD_BYTES]
        for status, path in sorted(whole, key=lambda each: (each[0].st_mtime_ns, each[1].name)):
            key, _, owner = path.name.partition(".")
            self._enter(key, owner, status.st_size)
        for owner in set(self._owners.values()):
            self._shrink_owner(owner)
        self.make_room(0)

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def make_room(self, num_bytes: int) -> None:
        """Reserve `num_bytes` of the limit for other files; a negative number frees them."""
        with self._mutex:
            self._guests_bytes += num_bytes
            self._shrink()

    def give_way(self, num_bytes: int) -> bool:
        """Evict `num_bytes` because the disk itself is full. Returns False if no block is left."""
        with self._mutex:
            return self._throw_away(num_bytes)

    def has(self, key: str) -> bool:
        with self._mutex:
            return key in self._sizes

    def use(self, keys: Collection[str], cost: float = 0.0) -> None:
        """Mark blocks as used now, as `PrefixMemory.use`."""
        with self._mutex:
            for key in reversed(tuple(keys)):
                if key in self._sizes:
                    self._order.use(key, cost / self._sizes[key])
                    with contextlib.suppress(OSError):  # the time matters only after a restart
                        mark_used(self._path(key))

    def get(self, key: str, into: Arrays, secret: bytes) -> bool:
        """Fill contiguous arrays with the block. Returns False, with their contents undefined, if
        there is none.

        A block that is damaged, or has other sizes or another secret, is removed.
        """
        with self._mutex:
            if key not in self._sizes:
                return False
            try:
                is_whole = self._read(key, into, secret)
            except (OSError, InvalidTag):
                is_whole = False
            if not is_whole:
                self._discard(key)
            return is_whole

    def put(
        self, key: str, arrays: Arrays, secret: bytes, owner: str = "", cost: float = 0.0
    ) -> bool:
        """Store a block. Returns False if there is no room, or the disk fails.

        owner: id of a device, whose own blocks are evicted if it has too many. cost: see `use`.
        """
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        size = _sealed_bytes(parts)
        with self._mutex:
            if size > self._limit_bytes - self._guests_bytes - self._drafts_bytes:
                return False
            if owner and self._owner_limit_bytes is not None and size > self._owner_limit_bytes:
                return False
            self._drafts_bytes += size
            self._shrink()
        draft = self._folder / f"{_DRAFT}{uuid.uuid4().hex}"
        is_kept = False
        try:
            # Without the lock, so that other threads can use the store.
            if self._write(draft, key, parts, size, secret):
                with self._mutex:
                    if key in self._sizes:
                        self._discard(key)  # it may have had another owner
                    mark_used(draft)
                    draft.replace(self._folder / _name(key, owner))
                    self._enter(key, owner, size, cost)
                    self._drafts_bytes -= size
                    self._shrink_owner(owner)
                is_kept = True
        except OSError:
            pass
        finally:
            if not is_kept:
                with self._mutex:
                    self._drafts_bytes -= size
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
        return is_kept

    def _write(
        self, draft: Path, key: str, parts: Sequence[NDArray[np.uint8]], size: int, secret: bytes
    ) -> bool:
        """Write and seal a draft. Returns False if the disk is full."""
        while True:
            salt = os.urandom(_SALT_BYTES)
            try:
                with open(
                    draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)
                ) as file:
                    file.write(_MAGIC + salt)
                    cipher = _cipher(secret, salt)
                    for nonce, plain, sealed in _records(parts):
                        cipher.encrypt_into(nonce, plain, key.encode(), sealed)
                        file.write(sealed)
                return True
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                if not self.give_way(size):
                    return False

    def _read(self, key: str, into: Arrays, secret: bytes) -> bool:
        """Read a block. Raises InvalidTag if it was not sealed with this secret."""
        parts = [array.reshape(-1).view(np.uint8) for array in into]
        with self._path(key).open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if os.fstat(file.fileno()).st_size != _sealed_bytes(parts) or not head.startswith(
                _MAGIC
            ):
                return False
            cipher = _cipher(secret, head[len(_MAGIC) :])
            for nonce, plain, sealed in _records(parts):
                if file.readinto(sealed) != sealed.nbytes:
                    return False
                cipher.decrypt_into(nonce, sealed, key.encode(), plain)
            forget_pages(file.fileno())
        return True

    def _path(self, key: str) -> Path:
        return self._folder / _name(key, self._owners.get(key, ""))

    def _enter(self, key: str, owner: str, size: int, cost: float = 0.0) -> None:
        """Add a block to the tables, as used now."""
        self._sizes[key] = size
        self._order.use(key, cost / size)
        if owner:
            self._owners[key] = owner

    def _shrink_owner(self, owner: str) -> None:
        """Evict an owner's blocks with the least worth until its limit is kept."""
        if self._owner_limit_bytes is None or not owner:
            return
        mine = [key for key in self._order if self._owners.get(key) == owner]
        left_bytes = sum(self._sizes[key] for key in mine) - self._owner_limit_bytes
        for key in mine:
            if left_bytes <= 0:
                break
            left_bytes -= self._sizes[key]
            self._evict(key)

    def _shrink(self) -> None:
        """Evict blocks with the least worth until the limit is kept, or none is left."""
        room_bytes = self._limit_bytes - self._guests_bytes - self._drafts_bytes
        self._throw_away(self.used_bytes - room_bytes)

    def _throw_away(self, num_bytes: int) -> bool:
        """Evict at least `num_bytes`, or all blocks. Returns whether there was any."""
        left_bytes = num_bytes
        if left_bytes <= 0:
            return False
        for key in self._order:
            if left_bytes <= 0:
                break
            left_bytes -= self._sizes[key]
            self._evict(key)
        return left_bytes < num_bytes

    def _discard(self, key: str) -> None:
        self._order.forget(key)
        self._remove(key)

    def _evict(self, key: str) -> None:
        self._order.evict(key)
        self._remove(key)

    def _remove(self, key: str) -> None:
        path = self._path(key)
        del self._sizes[key]
        self._owners.pop(key, None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _cipher(secret: bytes, salt: bytes) -> AESGCM:
    return AESGCM(hmac.digest(secret, b"edge block" + salt, hashlib.sha256))


def _records(
    parts: Sequence[NDArray[np.uint8]],
) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Nonce, plain bytes and output buffer of each record. All records share the buffer."""
    room = memoryview(bytearray(_RECORD_BYTES + _TAG_BYTES))
    number = 0
    for part in parts:
        for begin in range(0, part.nbytes, _RECORD_BYTES):
            plain = part[begin : begin + _RECORD_BYTES].data
            yield _NONCE.pack(number), plain, room[: plain.nbytes + _TAG_BYTES]
            number += 1


def _sealed_bytes(parts: Sequence[NDArray[np.uint8]]) -> int:
    """Bytes of a sealed block's file."""
    records = sum(-(-part.nbytes // _RECORD_BYTES) for part in parts)
    return _HEAD_BYTES + sum(part.nbytes for part in parts) + records * _TAG_BYTES


def _name(key: str, owner: str) -> str:
    """Name of a block's file."""
    return f"{key}.{owner}" if owner else key


def _is_block(path: Path) -> bool:
    """Whether a file is a block; other files are neither counted nor removed."""
    key, dot, owner = path.name.partition(".")
    is_owned = _OWNER.fullmatch(owner) is not None if dot else True
    return is_digest(key) and is_owned and path.is_file()
