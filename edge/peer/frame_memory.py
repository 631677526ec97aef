"""Memory of the incoming frames of one connection, taken from limits shared by the whole peer."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from edge.peer.quota import OwnerSemaphore
from edge.protocol.heartbeat import Hearing, patience_s

SMALL_PART_BYTES = 32 << 10
"""Larger parts of a frame are counted in the ledger, with the record that carries them. Smaller
ones have a separate limit, which is part of the process's baseline."""

_LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class FrameBytes:
    """Bytes held of each of the two limits."""

    large: int = 0
    small: int = 0

    def add(self, num_bytes: int, *, is_large: bool) -> None:
        if is_large:
            self.large += num_bytes
        else:
            self.small += num_bytes


class FrameMemory:
    """Counts each frame from its first byte until it is handled. For the loop."""

    def __init__(
        self, large: OwnerSemaphore, small: OwnerSemaphore, owner: object, hearing: Hearing
    ) -> None:
        """hearing: a sender that waits for memory is not counted as silent."""
        self._large = large
        self._small = small
        self._owner = owner
        self._hearing = hearing
        self._frame = FrameBytes()
        """Bytes of the frame being read; `_all` includes the frames not handled yet."""
        self._all = FrameBytes()
        self._admitted_s = 0.0
        """When the last part of the frame being read was admitted."""

    async def admit(self, num_bytes: int) -> None:
        """Wait until `num_bytes` fit under the shared limit (backpressure)."""
        is_large = num_bytes > SMALL_PART_BYTES
        self._hearing.not_listening()
        self._admitted_s = math.inf
        await (self._large if is_large else self._small).take(self._owner, num_bytes)
        self._hearing.listening()
        self._admitted_s = asyncio.get_running_loop().time()
        for taken in (self._frame, self._all):
            taken.add(num_bytes, is_large=is_large)

    def received(self) -> FrameBytes:
        """The bytes of the frame that is complete now, to be given back later."""
        taken, self._frame = self._frame, FrameBytes()
        return taken

    def give_back(self, taken: FrameBytes) -> None:
        self._all.large -= taken.large
        self._all.small -= taken.small
        if taken.large:
            self._large.give_back(self._owner, taken.large)
        if taken.small:
            self._small.give_back(self._owner, taken.small)

    def give_back_all(self) -> None:
        """Call it when no single frame will be given back any more."""
        self.give_back(replace(self._all))

    async def until_too_slow(self) -> int:
        """Return the bytes so far of a large frame that arrives too slowly while it holds shared
        memory."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            late_s, large = loop.time() - self._admitted_s, self._frame.large
            if large and late_s > patience_s(self._hearing.silent_after_s, large):
                return large
