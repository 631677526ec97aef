"""Records: the bytes of a message on the wire, plain or encrypted with AES-256-GCM.

An encrypted message is cut into records, to bound the memory of messages under way. A record is its
ciphertext and a tag of 16 bytes. The nonce is the record's number in its direction and is never
sent: a record that is lost, repeated, moved or of another link fails to decrypt. The message's size
is sent in the clear and authenticated.
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
"""Plaintext bytes of a record."""

LARGE_RECORD_BYTES = 512 << 10
LARGE_MESSAGE_BYTES = 1 << 20
"""Messages of this size get larger records: two of 1 MiB cross in 385 µs instead of 580, of 2 MiB
in 790 instead of 1190. One of 512 KiB is faster in two records than in one."""

TAG_BYTES = 16
SECRET_BYTES = 32

RECORDS_PER_KEY = 1 << 19
"""Records for one key, which encrypts at most 2^38 bytes. NIST SP 800-38D allows 2^36 in one record
and 2^32 records; for an attacker's chance of 2^-57, RFC 8446 (5.5) stops at 2^38.5 bytes in records
of 16 KiB."""

Part = Any
"""A C-contiguous array or a view of bytes. Both have ``nbytes``. Python's types know that an array
is a buffer only from 3.12 on."""

_NONCE = struct.Struct("!4xQ")

_MOST_ROOMS = 64
"""Views kept for reuse. A message may have any size, so there is a limit."""


class BrokenRecordError(Exception):
    """A record that the other end did not seal for this place in this link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSecrets:
    """Secrets from which the keys of both directions are derived."""

    sending: bytes
    receiving: bytes

    @classmethod
    def derived(
        cls, known: bytes, transcript: bytes, *, listens: bool, purpose: bytes = b"edge records"
    ) -> "RecordSecrets":
        """From a secret known to both sides only, and a digest of the handshake."""
        both = HKDF(SHA256(), 2 * SECRET_BYTES, salt=transcript, info=purpose).derive(known)
        ways = both[:SECRET_BYTES], both[SECRET_BYTES:]
        sending, receiving = reversed(ways) if listens else ways
        return cls(sending=sending, receiving=receiving)


class Records(Protocol):
    """Encoding and decoding of a message's bytes for the wire."""

    limit: int
    """Messages of at most this many plain bytes are one record."""

    def record_bytes(self, message_bytes: int) -> int:
        """Most plain bytes of a record, for a message of this size."""

    def seal(self, size: Buffer, part: Part) -> Part:
        """The bytes to send for a part of a message of ``size``; valid until the next call."""

    def space(self, part: Part) -> Part:
        """The space to receive this part's bytes in; valid until the next call."""

    def open(self, size: Buffer, part: Part) -> None:
        """Decode the received bytes into ``part``. Raises BrokenRecordError."""


class PlainRecords:
    """Bytes as they are, for connections that no other user can read or write."""

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
    """AES-256-GCM with one key for each direction, replaced before its limit."""

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
    """One direction: its key, its number of records, and space for the next one."""

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
        """Space for the record of ``nbytes`` plain bytes."""
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
    """The records of a link with these secrets. None: plain ones."""
    return PLAIN if secrets is None else SealedRecords(secrets)


def as_bytes(part: Part) -> memoryview:
    """The bytes of a C-contiguous array or a view, without a copy."""
    if isinstance(part, memoryview):
        return part
    try:
        return memoryview(part).cast("B")  # a quarter of the time of a view of an array
    except (ValueError, TypeError):  # no items, or a type that only numpy knows
        shared: memoryview = part.reshape(-1).view(np.uint8).data
        return shared


def parts(whole: memoryview, limit: int) -> list[memoryview]:
    """Bytes in parts of at most ``limit``."""
    return [whole[start : start + limit] for start in range(0, whole.nbytes, limit)]


def _expanded(secret: bytes, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), SECRET_BYTES, info=info).derive(secret)
