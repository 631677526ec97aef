"""A channel over one TCP connection.

Knows frames and their order; connecting happens elsewhere.
"""

import asyncio
import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from edge.transport.async_socket import AsyncSocket
from edge.transport.errors import ChannelClosedError, ProtocolError, TransportError
from edge.transport.frame import (
    OF_ALL_FRAMES,
    Admit,
    Frame,
    FrameAssembler,
    FrameLimits,
    LimitsOf,
    admit_all,
    encode,
    no_other_limits,
)
from edge.transport.sealed_socket import SealedSocket

DEATH_NOTICED_WITHIN_S = 20
"""Seconds until a device without power is detected, even without heartbeats."""


class TcpChannel:
    """A channel over one TCP connection after its handshake. See :class:`Channel`."""

    def __init__(
        self,
        connection: AsyncSocket | SealedSocket,
        remote_hello: Mapping[str, Any],
        host: str = "",
    ) -> None:
        self.peer = connection.peer
        self.host = host
        self.remote_hello: Mapping[str, Any] = MappingProxyType(dict(remote_hello))
        self._connection = connection
        self._assembler = FrameAssembler()
        self._sending = asyncio.Lock()
        self._is_receiving = False
        self._failure: TransportError | None = None

    @property
    def received_bytes(self) -> int:
        return self._connection.received_bytes

    async def send(self, frame: Frame) -> None:
        self._check_open()
        buffers = encode(frame)
        async with self._sending:
            self._check_open()
            await self._connection.send_all(buffers)

    async def receive(
        self,
        limits_of: LimitsOf = no_other_limits,
        admit: Admit = admit_all,
        *,
        most: FrameLimits = OF_ALL_FRAMES,
    ) -> Frame:
        self._check_open()
        if self._is_receiving:
            raise RuntimeError(f"another task already receives from {self.peer}")
        self._is_receiving = True
        try:
            frame = None
            while frame is None:
                if due_bytes := self._assembler.due_bytes:
                    await admit(due_bytes + min(due_bytes, self._connection.record_bytes))
                if not (unread_bytes := self._assembler.unread_bytes):
                    count = await self._connection.receive_into(self._assembler.wanted())
                    self._assembler.put(count, most)
                    unread_bytes = self._assembler.unread_bytes
                if unread_bytes:
                    await admit(unread_bytes)
                frame = self._assembler.read(limits_of)
            return frame
        except ProtocolError as error:
            self._failure = ProtocolError(f"{self.peer}: {error}")
            self._connection.close()
            raise copy.copy(self._failure) from error
        finally:
            self._is_receiving = False

    async def aclose(self) -> None:
        self._connection.close()
        self._assembler = FrameAssembler()  # frees a partial frame

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._connection.is_closed:
            raise ChannelClosedError(f"the channel to {self.peer} was closed")
