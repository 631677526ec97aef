"""What an AsyncSocket moves, sealed in records: how a handshake travels, and then a channel.

For a channel TLS itself would do. But its records have 16 KiB at most, each of them two system
calls and a turn of Python, and weights are shipped half as fast that way; AES alone takes a tenth
of a nanosecond a byte. So a channel's bytes go in records of up to 512 KiB, sealed as those of a
link: eight bytes of size, in the clear but authenticated, then the ciphertext and its tag. The
nonce of a record is its number, which is not sent.
"""

import asyncio
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag

from edge.transport.async_socket import AsyncSocket
from edge.transport.errors import PeerLostError, ProtocolError
from edge.transport.frame import Buffer
from edge.transport.records import (
    RECORD_BYTES,
    RECORDS_PER_KEY,
    TAG_BYTES,
    RecordSecrets,
    Way,
    parts,
)

_SIZE = struct.Struct("!Q")
CHANNEL_RECORD_BYTES = 512 << 10
"""Each costs a turn of the loop on both sides: a half of this is a third slower."""

_RECORDS_PER_KEY = RECORDS_PER_KEY * RECORD_BYTES // CHANNEL_RECORD_BYTES
"""As many bytes as a link's."""

_SMALL_BYTES = 64 << 10
"""Frames up to this are one record."""

_SPARE_BYTES = 4096
"""Of a buffer that waits for a record: most are small."""

_RECORDS_A_TURN = 2
"""Before other tasks get theirs."""


def after_handshake(
    connection: AsyncSocket, secrets: RecordSecrets | None
) -> "AsyncSocket | SealedSocket":
    """What a channel goes on with; without secrets as it is."""
    return connection if secrets is None else SealedSocket(connection, secrets)


class SealedSocket:
    """Owns an AsyncSocket, of which it has the interface. A send that is given up closes it."""

    def __init__(
        self, plain: AsyncSocket, secrets: RecordSecrets, *, reads_ahead: bool = True
    ) -> None:
        """reads_ahead: nothing but records of these secrets will ever follow."""
        self.peer = plain.peer
        self._plain = plain
        self._reads_ahead = reads_ahead
        self._sending = Way(secrets.sending, _RECORDS_PER_KEY)
        self._receiving = Way(secrets.receiving, _RECORDS_PER_KEY)
        self._arrived = bytearray(_SPARE_BYTES)
        self._last_bytes = 0
        """Of the last record."""
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
            size = await self._record()
            record = memoryview(self._arrived)[self._begin : self._begin + _SIZE.size + size]
            self._begin += record.nbytes + TAG_BYTES
            self._last_bytes = size
            if space.nbytes >= size:
                self._open(record, space[:size])
                return size
            plain = memoryview(bytearray(size))
            self._open(record, plain)
            self._opened = plain
        count = min(space.nbytes, self._opened.nbytes)
        space[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    async def send_all(self, buffers: Sequence[Buffer]) -> None:
        """See `AsyncSocket`."""
        whole = [memoryview(buffer) for buffer in buffers]
        if sum(each.nbytes for each in whole) <= _SMALL_BYTES:
            records = [memoryview(b"".join(whole))]
        else:
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

    async def _record(self) -> int:
        """Wait until a whole record is there; its plain size. Given up, it loses nothing."""
        while True:
            have = self._end - self._begin
            needed = _SIZE.size
            if have >= needed:
                (size,) = _SIZE.unpack_from(self._arrived, self._begin)
                if not 0 < size <= CHANNEL_RECORD_BYTES:
                    raise self._broken()
                needed += size + TAG_BYTES
                if have >= needed:
                    return int(size)
            self._make_room(needed)
            stop = len(self._arrived) if self._reads_ahead else self._begin + needed
            space = memoryview(self._arrived)[self._end : stop]
            self._end += await self._plain.receive_into(space)

    def _make_room(self, needed: int) -> None:
        """So that a record of so many bytes fits behind where the next one begins."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if max(self._last_bytes, needed) <= _SPARE_BYTES < len(self._arrived):
                self._arrived = bytearray(_SPARE_BYTES)  # a channel mostly waits
        if self._begin + needed <= len(self._arrived):
            return
        rest = self._arrived[self._begin : self._end]
        if needed > len(self._arrived):
            self._arrived = bytearray(needed + _SPARE_BYTES)
        self._arrived[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _open(self, record: memoryview, plain: memoryview) -> None:
        size = record[: _SIZE.size]
        start = self._begin - plain.nbytes - TAG_BYTES
        sealed = memoryview(self._arrived)[start : self._begin]
        cipher, nonce = self._receiving.next()
        try:
            cipher.decrypt_into(nonce, sealed, size, plain)
        except InvalidTag:
            raise self._broken() from None

    def _broken(self) -> ProtocolError:
        self.close()
        return ProtocolError("it sent what was not sealed for this channel")
