"""Prefix cache on disk: keys, values and states, found by the tokens that they follow from.

Each record is a file, named by its key, a digest of its content's names and its owner once it is
complete. It is sealed with the owner's secret: AES-256-GCM under a key for each file, in parts of
at most 1 MiB. Names and sizes of its pieces come first, so a shard of another plan reads only its
own. Damaged, truncated or foreign records count as missing.

Requests that are swapped out take room from records. Eviction is by the cost to compute a block
again (`eviction_order.py`); records of earlier processes go first, the oldest before others. Each
owner may use only a part of the room.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import io
import os
import re
import struct
import sys
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from edge.offload.errors import StoreError
from edge.offload.files.last_use import mark_used
from edge.offload.kv.prefix_records import (
    PART_DIGITS,
    Pieces,
    PrefixPart,
    PrefixRecords,
    as_bytes,
)
from edge.system.files import forget_pages

_MAGIC = b"edge-kv3"
_SALT_BYTES = 32
_HEAD = struct.Struct(f"<{len(_MAGIC)}s{_SALT_BYTES}sI")
"""Magic, salt, and the bytes of the index."""
_MOST_INDEX_BYTES = 1 << 20
_SEALED_BYTES = 1 << 20
"""Most plain bytes that are sealed at once."""
_TAG_BYTES = 16
_NONCE = struct.Struct("!4xQ")
"""The number of a sealed part, which is a safe nonce because a file's key seals nothing else."""
_DRAFT = ".draft-"
_NAME = re.compile(
    rf"(?P<id>[0-9a-f]{{64}}(?P<part>-[0-9a-f]{{{PART_DIGITS}}})?)(\.(?P<owner>[0-9a-f]{{1,64}}))?",
    re.ASCII,
)
"""Name of a record's file; without a part, of a version that knew no parts."""

Sizes = Mapping[str, int]
"""Bytes of the pieces by name, in the order of the file."""


class PrefixStore(PrefixRecords):
    """A prefix cache in one folder, thread-safe. On a full disk it keeps less."""

    def __init__(
        self, folder: Path, limit_bytes: int, *, owner_limit_bytes: int | None = None
    ) -> None:
        """owner_limit_bytes: most bytes of one owner's records.
        Raises StoreError if `folder` cannot be made or read.
        """
        super().__init__()
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._each_owner_bytes = owner_limit_bytes
        self._guests_bytes = 0
        self._drafts_bytes = 0
        found = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for draft in folder.glob(f"{_DRAFT}*"):  # of dead processes
                draft.unlink()
            for path in folder.iterdir():  # other files are neither counted nor removed
                if (name := _NAME.fullmatch(path.name)) is None or not path.is_file():
                    continue
                status = path.stat()
                # A loss of power may leave the name of a file alone.
                if name["part"] is None or status.st_size < _HEAD.size:
                    path.unlink(missing_ok=True)
                else:
                    found.append((status.st_mtime_ns, name["id"], name["owner"], status.st_size))
        except OSError as error:
            raise StoreError(
                f"keys and values cannot be kept in {folder}: {error.strerror}; choose another "
                "folder or repair its permissions"
            ) from error
        for _used_ns, id, owner, size in sorted(found, key=lambda each: each[:2]):
            if id in self._sizes:  # of two owners
                self._remove(id)
            self._enter(id, owner or "", size)
        for owner in set(self._owners.values()):
            self._shrink(self._owner_limit(owner), owner)
        self.make_room(0)

    def make_room(self, num_bytes: int) -> None:
        """Reserve `num_bytes` of the limit for other files; a negative number frees them."""
        with self._mutex:
            self._guests_bytes += num_bytes
            self._shrink(self._room_bytes)

    def give_way(self, num_bytes: int) -> bool:
        """Evict `num_bytes` because the disk itself is full. Returns False if no record is left."""
        with self._mutex:
            return self._shrink(self._taken.total() - num_bytes)

    def put(
        self, key: str, pieces: Pieces, secret: bytes = b"", owner: str = "", cost: float = 0.0
    ) -> bool:
        """See `PrefixRecords.put`. Returns False also if the disk fails."""
        part = PrefixPart.of(tuple(pieces))
        id, index = part.record(key), _index({name: each.nbytes for name, each in pieces.items()})
        size = _file_bytes(len(index), (each.nbytes for each in pieces.values()))
        with self._mutex:
            if size > min(self._room_bytes, self._owner_limit(owner)):
                return False
            if len(index) > _MOST_INDEX_BYTES:
                return False
            self._drafts_bytes += size
            self._shrink(self._room_bytes)
        draft = self._folder / f"{_DRAFT}{uuid.uuid4().hex}"
        is_kept = False
        try:
            # Without the lock, so that other threads can use the store.
            if self._write(draft, id, index, pieces, size, secret):
                with self._mutex:
                    self._remove(id)  # it may have had another owner
                    mark_used(draft)
                    draft.replace(self._folder / _name(id, owner))
                    self._names[part.digest] = part.names
                    self._enter(id, owner, size, cost)
                    self._drafts_bytes -= size
                    self._shrink(self._owner_limit(owner), owner)
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

    @property
    def _room_bytes(self) -> int:
        return self._limit_bytes - self._guests_bytes - self._drafts_bytes

    def _owner_limit(self, owner: str) -> int:
        if owner and self._each_owner_bytes is not None:
            return self._each_owner_bytes
        return sys.maxsize

    def _write(
        self, draft: Path, id: str, index: bytes, pieces: Pieces, size: int, secret: bytes
    ) -> bool:
        """Write and seal a draft. Returns False if the disk is full."""
        contents = [np.frombuffer(index, np.uint8), *map(as_bytes, pieces.values())]
        while True:
            salt = os.urandom(_SALT_BYTES)
            try:
                with open(
                    draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)
                ) as file:
                    file.write(_HEAD.pack(_MAGIC, salt, len(index)))
                    cipher, number = _cipher(secret, salt), 0
                    for content in contents:
                        for plain, sealed in _parts(content):
                            cipher.encrypt_into(_NONCE.pack(number), plain, id.encode(), sealed)
                            file.write(sealed)
                            number += 1
                return True
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                if not self.give_way(size):
                    return False

    def _names_of(self, id: str, secret: bytes) -> tuple[str, ...]:
        digest = id[-PART_DIGITS:]
        if digest not in self._names:
            names = tuple(self._sizes_of(id, secret))
            if PrefixPart.of(names).digest != digest:
                self._remove(id)
                return ()
            self._names[digest] = names
        return self._names[digest]

    def _sizes_of(self, id: str, secret: bytes) -> Mapping[str, int]:
        try:
            with self._path(id).open("rb") as file:
                return _Sealed(file, id, secret).sizes
        except (OSError, InvalidTag, ValueError):
            return {}

    def _fill(self, id: str, into: Mapping[str, NDArray[np.uint8]], secret: bytes) -> bool:
        if id not in self._sizes:
            return False
        try:
            with self._path(id).open("rb") as file:
                _Sealed(file, id, secret).read(into)
                forget_pages(file.fileno())
        except (OSError, InvalidTag, ValueError):
            return False
        return True

    def use(self, ids: Collection[str], cost: float = 0.0) -> None:
        super().use(ids, cost)
        with self._mutex:
            for id in reversed(tuple(ids)):
                if id in self._sizes:
                    with contextlib.suppress(OSError):  # the time matters only after a restart
                        mark_used(self._path(id))

    def _delete(self, id: str) -> None:
        with contextlib.suppress(OSError):
            self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / _name(id, self._owners.get(id, ""))


class _Sealed:
    """An open file of a record. Raises ValueError or InvalidTag for a damaged or foreign one."""

    def __init__(self, file: io.BufferedReader, id: str, secret: bytes) -> None:
        self._file, self._id = file, id
        head = file.read(_HEAD.size)
        if len(head) != _HEAD.size:
            raise ValueError("a truncated head")
        magic, salt, index_bytes = _HEAD.unpack(head)
        if magic != _MAGIC or index_bytes > _MOST_INDEX_BYTES:
            raise ValueError("another form of file")
        self._cipher = _cipher(secret, salt)
        index = np.empty(index_bytes, np.uint8)
        self._number = 0
        self._open(index)
        self.sizes = _sizes(index.tobytes())
        size = os.fstat(file.fileno()).st_size
        if size != _file_bytes(index_bytes, self.sizes.values()):
            raise ValueError("a truncated file")

    def read(self, into: Mapping[str, NDArray[np.uint8]]) -> None:
        """Fill these arrays, and pass over other pieces."""
        for name, size in self.sizes.items():
            if (array := into.get(name)) is None:
                self._file.seek(_sealed_bytes(size), os.SEEK_CUR)
                self._number += _num_parts(size)
            elif array.nbytes != size:
                raise ValueError("a piece of another size")
            else:
                self._open(array)

    def _open(self, content: NDArray[np.uint8]) -> None:
        """Decrypt what comes next in the file."""
        for plain, sealed in _parts(content):
            if self._file.readinto(sealed) != sealed.nbytes:
                raise ValueError("a truncated file")
            nonce = _NONCE.pack(self._number)
            self._cipher.decrypt_into(nonce, sealed, self._id.encode(), plain)
            self._number += 1


def _cipher(secret: bytes, salt: bytes) -> AESGCM:
    return AESGCM(hmac.digest(secret, b"edge block" + salt, hashlib.sha256))


def _parts(content: NDArray[np.uint8]) -> Iterator[tuple[memoryview, memoryview]]:
    """The plain bytes of each part, and a buffer for it once it is sealed, which all share."""
    room = memoryview(bytearray(min(content.nbytes, _SEALED_BYTES) + _TAG_BYTES))
    for begin in range(0, content.nbytes, _SEALED_BYTES):
        plain = content[begin : begin + _SEALED_BYTES].data
        yield plain, room[: plain.nbytes + _TAG_BYTES]


def _num_parts(num_bytes: int) -> int:
    return -(-num_bytes // _SEALED_BYTES)


def _sealed_bytes(num_bytes: int) -> int:
    return num_bytes + _num_parts(num_bytes) * _TAG_BYTES


def _file_bytes(index_bytes: int, sizes: Iterable[int]) -> int:
    return _HEAD.size + _sealed_bytes(index_bytes) + sum(map(_sealed_bytes, sizes))


def _index(sizes: Sizes) -> bytes:
    return "".join(f"{size} {name}\n" for name, size in sizes.items()).encode()


def _sizes(index: bytes) -> Sizes:
    """Read an index. Raises ValueError for another text."""
    sizes: dict[str, int] = {}
    for line in index.decode().splitlines():
        size, _, name = line.partition(" ")
        if not size.isdecimal() or len(size) > 18 or name in sizes:
            raise ValueError("another form of index")
        sizes[name] = int(size)
    return sizes


def _name(id: str, owner: str) -> str:
    """Name of a record's file."""
    return f"{id}.{owner}" if owner else id
