"""What an AsyncSocket moves, sealed in records: how a handshake travels, and then a channel.

For a channel TLS itself would do. But its records have 16 KiB at most, each of them two system
calls and a turn of Python, and weights are shipped half as fast that way; AES alone takes a tenth
of a nanosecond a byte. So a channel's bytes go in records of up to 512 KiB, sealed as those of a
link: eight bytes of size, in the clear but authenticated, then the ciphertext and its tag. The
nonce of a record is its number, which is not sent.

A record is opened once it is whole. So that nobody has others set aside memory by beginning large
ones, a record of more than ``SMALL_BYTES`` is a part of what is waited for, whose size the receiver
has allowed: the beginning of a frame is a small one.
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
"""Each costs a turn of the loop on both sides: a half of this is a third slower."""

SMALL_BYTES = 8 << 10
"""Frames up to this are one record, and any record may have so much."""

_SPARE_BYTES = 4096
"""Size of a buffer that waits for a record: most are small."""

_RECORDS_A_TURN = 2
"""Before other tasks get theirs."""


def after_handshake(
    connection: AsyncSocket, secrets: RecordSecrets | None
) -> "AsyncSocket | SealedSocket":
    """What a channel goes on with; without secrets as it is."""
    return connection if secrets is None else SealedSocket(connection, secrets)


class SealedSocket:
    """Owns an AsyncSocket, of which it has the interface. A send that is given up closes it."""

    record_bytes = CHANNEL_RECORD_BYTES

    def __init__(
        self, plain: AsyncSocket, secrets: RecordSecrets, *, reads_ahead: bool = True
    ) -> None:
        """reads_ahead: nothing but records of these secrets will ever follow."""
        self.peer = plain.peer
        self._plain = plain
        self._reads_ahead = reads_ahead
        self._sending = Way(secrets.sending, RECORDS_PER_KEY)
        self._receiving = Way(secrets.receiving, RECORDS_PER_KEY)
        self._arrived = bytearray(_SPARE_BYTES)
        self._begin = self._end = 0
        """What of that has been received and not yet opened."""
        self._opened = memoryview(b"")
        """What has been opened and not yet been asked for."""

    @property
    def is_closed(self) -> bool:
        return self._plain.is_closed

    @property
    def received_bytes(self) -> int:
        """Sealed ones, since the connection was made."""
        return self._plain.received_bytes

    def close(self) -> None:
        self._plain.close()

    async def receive_into(self, space: memoryview) -> int:
        """See `AsyncSocket`. ProtocolError for what was not sealed for this channel."""
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
            raise  # what it sent before may still be read
        except BaseException:
            self.close()  # no number may be used twice, or left out
            raise

    async def _record(self, wanted: int) -> int:
        """Wait until a whole record is there, of bytes that are wanted unless it is small; its
        plain size. Given up, it loses nothing."""
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
        """So that a record of `needed` bytes fits behind where the next one begins."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + needed > len(self._arrived):
            self._move(max(needed, len(self._arrived)))

    def _let_go(self) -> None:
        """What comes next may be long in coming, and is mostly small."""
        if len(self._arrived) > _SPARE_BYTES:
            self._move(max(_SPARE_BYTES, self._end - self._begin))

    def _move(self, num_bytes: int) -> None:
        """Move what is not opened yet to the beginning of `num_bytes` bytes."""
        rest = self._arrived[self._begin : self._end]
        if num_bytes != len(self._arrived):
            self._arrived = bytearray(num_bytes)
        self._arrived[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _open(self, plain: memoryview) -> None:
        """The record that begins where nothing has been opened yet."""
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
