"""What a link's messages look like on the wire: plain, or sealed by AES-256-GCM.

A sealed message is cut into records, so that what is under way needs little memory of its own. Each
record is its ciphertext and a tag of 16 bytes; its nonce is the number of the record in its
direction, which is never sent: a record that is lost, repeated, moved or of another link does not
open. The message's size, which goes ahead in the clear, is bound in.
"""

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from edge.transport.frame import Buffer

RECORD_BYTES = 256 << 10
"""Plain bytes of a record."""

LARGE_RECORD_BYTES = 512 << 10
LARGE_MESSAGE_BYTES = 1 << 20
"""From this on, records are larger: two messages of 1 MiB cross in 385 µs instead of 580, of 2 MiB
in 790 instead of 1190. One of 512 KiB is faster in two records than in one."""

TAG_BYTES = 16
SECRET_BYTES = 32

RECORDS_PER_KEY = 1 << 19
"""A key seals at most 2^38 bytes. NIST SP 800-38D allows 2^36 in one record and 2^32 records; for
an attacker's chance of 2^-57, RFC 8446 (5.5) stops at 2^38.5 bytes in records of 16 KiB."""

Part = Any
"""Bytes to be moved: a C-contiguous array, or a view of bytes. Both tell ``nbytes``, and that an
array is a buffer typing learns in Python 3.12."""

_NONCE = struct.Struct("!4xQ")

_MOST_ROOMS = 64
"""Views kept for reuse; a message may have any size, so there must be an end."""


class BrokenRecordError(Exception):
    """A record that was not sealed by the other end of this link, as this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSecrets:
    """What the two directions of one connection are sealed with."""

    sending: bytes
    receiving: bytes

    @classmethod
    def derived(
        cls, known: bytes, transcript: bytes, *, listens: bool, purpose: bytes = b"edge records"
    ) -> "RecordSecrets":
        """From what both sides alone know, and a digest of all that was said before."""
        both = HKDF(SHA256(), 2 * SECRET_BYTES, salt=transcript, info=purpose).derive(known)
        ways = both[:SECRET_BYTES], both[SECRET_BYTES:]
        sending, receiving = reversed(ways) if listens else ways
        return cls(sending=sending, receiving=receiving)


class Records(Protocol):
    """How the bytes of a message become those on the wire, in both directions."""

    limit: int
    """Plain bytes of a message that is one record in any case."""

    def record_bytes(self, message_bytes: int) -> int:
        """Most plain bytes of a record of a message of this size."""

    def seal(self, size: Buffer, part: Part) -> Part:
        """What is sent for a part of a message of ``size``; valid until the next call."""

    def space(self, part: Part) -> Part:
        """Where to receive what was sent for this part; valid until the next call."""

    def open(self, size: Buffer, part: Part) -> None:
        """Put what was received into ``part``. Raises BrokenRecordError."""


class PlainRecords:
    """Bytes as they are, on a way that nobody else can read or write."""

    limit = 1 << 62

    def record_bytes(self, message_bytes: int) -> int:
        return self.limit

    def seal(self, size: Buffer, part: Part) -> Part:
        return part

    def space(self, part: Part) -> Part:
        return part

    def open(self, size: Buffer, part: Part) -> None:
        pass


class SealedRecords:
    """AES-256-GCM under a key of its own for each direction, and a new one before it wears out."""

    limit = RECORD_BYTES

    def __init__(self, secrets: RecordSecrets, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._sending = Way(secrets.sending, records_per_key)
        self._receiving = Way(secrets.receiving, records_per_key)

    def record_bytes(self, message_bytes: int) -> int:
        return LARGE_RECORD_BYTES if message_bytes >= LARGE_MESSAGE_BYTES else RECORD_BYTES

    def seal(self, size: Buffer, part: Part) -> Part:
        way = self._sending
        sealed = way.room(part.nbytes)
        cipher, nonce = way.next()
        cipher.encrypt_into(nonce, as_bytes(part), size, sealed)
        return sealed

    def space(self, part: Part) -> Part:
        return self._receiving.room(part.nbytes)

    def open(self, size: Buffer, part: Part) -> None:
        way = self._receiving
        sealed = way.room(part.nbytes)
        cipher, nonce = way.next()
        try:
            cipher.decrypt_into(nonce, sealed, size, as_bytes(part))
        except InvalidTag:
            raise BrokenRecordError from None


class Way:
    """One direction: its key, how many records it has sealed, and room for the next one."""

    def __init__(self, secret: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._records_per_key = records_per_key
        self._store = bytearray()
        self._rooms: dict[int, memoryview] = {}
        self._begin(secret)

    def next(self) -> tuple[AESGCM, bytes]:
        """The cipher and the nonce of the next record."""
        if self._count == self._records_per_key:
            self._begin(_expanded(self._secret, b"edge next"))
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return self._cipher, nonce

    def room(self, nbytes: int) -> memoryview:
        """Where a record of that many plain bytes lies sealed."""
        room = self._rooms.get(nbytes)
        if room is None:
            if nbytes + TAG_BYTES > len(self._store):
                self._store = bytearray(nbytes + TAG_BYTES)
                self._rooms.clear()
            elif len(self._rooms) >= _MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[nbytes] = memoryview(self._store)[: nbytes + TAG_BYTES]
        return room

    def _begin(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = AESGCM(_expanded(secret, b"edge key"))
        self._count = 0


PLAIN = PlainRecords()


def records_of(secrets: RecordSecrets | None) -> Records:
    """Those of a link with these secrets; None: without any."""
    return PLAIN if secrets is None else SealedRecords(secrets)


def as_bytes(part: Part) -> memoryview:
    """The bytes of a C-contiguous array, shared; a view of bytes is what it is."""
    if isinstance(part, memoryview):
        return part
    try:
        return memoryview(part).cast("B")  # a quarter of the time that a view of an array takes
    except (ValueError, TypeError):  # no item at all, or of a type that is numpy's alone
        shared: memoryview = part.reshape(-1).view(np.uint8).data
        return shared


def parts(whole: memoryview, limit: int) -> list[memoryview]:
    """Bytes in parts of at most ``limit``."""
    return [whole[start : start + limit] for start in range(0, whole.nbytes, limit)]


def _expanded(secret: bytes, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), SECRET_BYTES, info=info).derive(secret)
