"""A TLS session inside an encrypted connection, for mutual authentication by certificates.

Knows `ssl` and the bytes below; the handshake decides what is said inside.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from edge.transport.errors import PeerLostError
from edge.transport.frame import Buffer
from edge.transport.sealed_socket import SMALL_BYTES, SealedSocket

_READ_BYTES = 16 << 10

T = TypeVar("T")


class TlsSession:
    """TLS over a SealedSocket, which it does not close. Call `handshake` first."""

    def __init__(self, below: SealedSocket, context: ssl.SSLContext, *, listens: bool) -> None:
        self.peer = below.peer
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._space = memoryview(bytearray(_READ_BYTES))

    async def handshake(
        self, check: Callable[[Mapping[str, Any], bytes], object]
    ) -> tuple[Mapping[str, Any], bytes]:
        """The verified certificate of the other end, as `ssl` describes it and in DER.

        `check` gets both. The connecting side sends its own certificate only if `check` raises
        nothing, so that a refused device does not learn its identity.

        Raises PeerLostError, also if either side rejects a certificate; and what `check` raises.
        """

        def step() -> tuple[Mapping[str, Any], bytes]:
            self._tls.do_handshake()
            certificate, encoded = self._tls.getpeercert(), self._tls.getpeercert(binary_form=True)
            assert certificate, "both contexts require one"
            assert encoded
            check(certificate, encoded)
            return certificate, encoded

        return await self._done(step)

    async def send_all(self, buffers: Sequence[Buffer]) -> None:
        """See `AsyncSocket`."""
        content = b"".join(buffers)
        await self._done(lambda: self._tls.write(content))

    async def receive_into(self, space: memoryview) -> int:
        """See `AsyncSocket`."""
        part = await self._done(lambda: self._tls.read(space.nbytes))
        if not part:
            raise PeerLostError(self.peer, "it closed the connection")
        space[: len(part)] = part
        return len(part)

    async def _done(self, step: Callable[[], T]) -> T:
        """The result of `step`, repeated until the bytes it waits for have come."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                count = await self._below.receive_into(self._space)
                self._incoming.write(self._space[:count])
            except OSError as error:
                await self._flush()  # tell the other end the reason
                raise PeerLostError(self.peer, error.strerror or str(error)) from error
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        while self._outgoing.pending:
            await self._below.send_all((self._outgoing.read(SMALL_BYTES),))
