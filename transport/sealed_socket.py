"""An AsyncSocket with encrypted records, for handshakes and channels.

Why not TLS for channels: its records have at most 16 KiB, each costs two system calls and a turn of
Python, and weights ship half as fast; AES alone takes 0.1 ns a byte. So a channel has records of up
to 512 KiB, sealed as those of a link: eight bytes of size, in the clear but authenticated, then the
ciphertext and its tag. The nonce is the record's number, which is not sent.

A record is decrypted once it is complete. Starting large records must not make a receiver allocate
memory. So a record above ``SMALL_BYTES`` must be part of an awaited size that the receiver has
allowed; a frame begins with a small one.
"""

import asyncio
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag

from edge.transport.async_socket import AsyncSocket
from edge.transport.errors import PeerLostError, ProtocolError
from edge.transport.frame import Buffer
from edge.transport.records import (
    RECORDS_PER_KEY,
    TAG_BYTES,
    RecordSecrets,
    Way,
    parts,
)

_SIZE = struct.Struct("!Q")
CHANNEL_RECORD_BYTES = 512 << 10
"""Each record costs both loops a turn: half this size is a third slower."""

SMALL_BYTES = 8 << 10
"""Frames up to this size are one record, and any record may have this size."""

_SPARE_BYTES = 4096
"""Size of the buffer that waits for a record; most are small."""

_RECORDS_A_TURN = 2
"""Records until other tasks get a turn."""


def after_handshake(
    connection: AsyncSocket, secrets: RecordSecrets | None
) -> "AsyncSocket | SealedSocket":
    """The socket of a channel: encrypted, or as it is without secrets."""
    return connection if secrets is None else SealedSocket(connection, secrets)


class SealedSocket:
    """Owns an AsyncSocket and has its interface. A cancelled send closes it."""

    record_bytes = CHANNEL_RECORD_BYTES

    def __init__(
        self, plain: AsyncSocket, secrets: RecordSecrets, *, reads_ahead: bool = True
    ) -> None:
        """reads_ahead: whether only records with these secrets will follow."""
        self.peer = plain.peer
        self._plain = plain
        self._reads_ahead = reads_ahead
        self._sending = Way(secrets.sending, RECORDS_PER_KEY)
        self._receiving = Way(secrets.receiving, RECORDS_PER_KEY)
        self._arrived = bytearray(_SPARE_BYTES)
        self._begin = self._end = 0
        """Range of received bytes that are not decrypted yet."""
        self._opened = memoryview(b"")
        """Decrypted bytes that were not asked for yet."""

    @property
    def is_closed(self) -> bool:
        return self._plain.is_closed

    @property
    def received_bytes(self) -> int:
        """Encrypted bytes since the connection was made."""
        return self._plain.received_bytes

    def close(self) -> None:
        self._plain.close()

    async def receive_into(self, space: memoryview) -> int:
        """See `AsyncSocket`. Raises ProtocolError for bytes that were not sealed for this
        channel."""
        while not self._opened:
            size = await self._record(space.nbytes)
            fits = space.nbytes >= size
            plain = space[:size] if fits else memoryview(bytearray(size))
            self._open(plain)
            if space.nbytes == size or size <= SMALL_BYTES:
                self._let_go()
            if fits:
                return size
            self._opened = plain
        count = min(space.nbytes, self._opened.nbytes)
        space[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    async def send_all(self, buffers: Sequence[Buffer]) -> None:
        """See `AsyncSocket`."""
        whole = [memoryview(buffer) for buffer in buffers]
        if sum(each.nbytes for each in whole) <= SMALL_BYTES:
            records = [memoryview(b"".join(whole))]
        else:
            whole[:1] = whole[0][:SMALL_BYTES], whole[0][SMALL_BYTES:]
            records = [part for each in whole for part in parts(each, CHANNEL_RECORD_BYTES)]
        sealed = bytearray(max(part.nbytes for part in records) + TAG_BYTES)
        try:
            for number, part in enumerate(records, start=1):
                size = _SIZE.pack(part.nbytes)
                record = memoryview(sealed)[: part.nbytes + TAG_BYTES]
                cipher, nonce = self._sending.next()
                cipher.encrypt_into(nonce, part, size, record)
                await self._plain.send_all((size, record))
                if number % _RECORDS_A_TURN == 0:
                    await asyncio.sleep(0)
        except PeerLostError:
            raise  # what the peer sent before may still be read
        except BaseException:
            self.close()  # no record number may be used twice, or skipped
            raise

    async def _record(self, wanted: int) -> int:
        """Wait for a complete record, whose size is wanted or small. Returns its plain size. A
        cancelled call loses nothing."""
        while True:
            have = self._end - self._begin
            needed = _SIZE.size
            if have >= needed:
                (size,) = _SIZE.unpack_from(self._arrived, self._begin)
                if not 0 < size <= max(SMALL_BYTES, min(wanted, CHANNEL_RECORD_BYTES)):
                    raise self._broken()
                needed += size + TAG_BYTES
                if have >= needed:
                    return int(size)
            ahead = max(needed, _SPARE_BYTES) if self._reads_ahead else needed
            self._make_room(ahead)
            space = memoryview(self._arrived)[self._end : self._begin + ahead]
            self._end += await self._plain.receive_into(space)

    def _make_room(self, needed: int) -> None:
        """Make room for a record of `needed` bytes at the start of the next one."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + needed > len(self._arrived):
            self._move(max(needed, len(self._arrived)))

    def _let_go(self) -> None:
        """Shrink the buffer: the next record may be late and is mostly small."""
        if len(self._arrived) > _SPARE_BYTES:
            self._move(max(_SPARE_BYTES, self._end - self._begin))

    def _move(self, num_bytes: int) -> None:
        """Move the bytes that are not decrypted yet into a buffer of `num_bytes` bytes."""
        rest = self._arrived[self._begin : self._end]
        if num_bytes != len(self._arrived):
            self._arrived = bytearray(num_bytes)
        self._arrived[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _open(self, plain: memoryview) -> None:
        """Decrypt the record at the beginning of the buffer."""
        start = self._begin + _SIZE.size
        end = start + plain.nbytes + TAG_BYTES
        whole = memoryview(self._arrived)
        size, sealed = whole[self._begin : start], whole[start:end]
        self._begin = end
        cipher, nonce = self._receiving.next()
        try:
            cipher.decrypt_into(nonce, sealed, size, plain)
        except InvalidTag:
            raise self._broken() from None

    def _broken(self) -> ProtocolError:
        self.close()
        return ProtocolError("it sent what was not sealed for this channel")
