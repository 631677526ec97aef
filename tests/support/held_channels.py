"""A channel that stops before it sends a frame of one kind, until a test lets it go on."""

from __future__ import annotations

import asyncio

from edge.transport import Channel, Frame
from edge.transport.testing import Fault, FaultyChannel

_NEVER = 1 << 30


class HeldChannel(FaultyChannel):
    """Owns `inner`."""

    def __init__(self, inner: Channel, kind: str) -> None:
        super().__init__(inner, Fault.LOSE, after_calls=_NEVER)
        self._kind = kind
        self.reached = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def send(self, frame: Frame) -> None:
        if frame.kind == self._kind:
            self.reached.set()
            await self.goes_on.wait()
        await super().send(frame)
