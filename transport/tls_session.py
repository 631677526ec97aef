"""TLS within a connection that is sealed already: who is at the other end, proved by certificates.

Knows `ssl` and the bytes below; what is told inside, and what comes of it, is the handshake's.
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
    """Over a SealedSocket, which it does not close. `handshake` first."""

    def __init__(self, below: SealedSocket, context: ssl.SSLContext, *, listens: bool) -> None:
        self.peer = below.peer
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._space = memoryview(bytearray(_READ_BYTES))

    async def handshake(
        self, check: Callable[[Mapping[str, Any], bytes], object]
    ) -> tuple[Mapping[str, Any], bytes]:
        """The certificate of the other end, as `ssl` describes it and as it is (DER).

        `check` is called with both. The connecting side's own certificate is sent only if it
        raises nothing: whom it does not want to talk to must not learn who it is.

        Raises PeerLostError, also for a certificate that is not accepted, here or there; and what
        `check` raises.
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
        """What the step returns, once what it waits for has come."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                count = await self._below.receive_into(self._space)
                self._incoming.write(self._space[:count])
            except OSError as error:
                await self._flush()  # the other end is told why
                raise PeerLostError(self.peer, error.strerror or str(error)) from error
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        while self._outgoing.pending:
            await self._below.send_all((self._outgoing.read(SMALL_BYTES),))
