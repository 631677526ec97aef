"""What the frames of one connection take of the rooms that all of a peer's share."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from edge.peer.quota import OwnerSemaphore
from edge.protocol.heartbeat import Hearing, patience_s

SMALL_PART_BYTES = 32 << 10
"""A part of a frame that is larger has its place in the ledger, with the record in which it comes.
Smaller ones have a room of their own, which is a part of what the process takes."""

_LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class FrameBytes:
    """Bytes of the two rooms."""

    large: int = 0
    small: int = 0

    def add(self, num_bytes: int, *, is_large: bool) -> None:
        if is_large:
            self.large += num_bytes
        else:
            self.small += num_bytes


class FrameMemory:
    """From the first byte of each until it is done with. For the loop."""

    def __init__(
        self, large: OwnerSemaphore, small: OwnerSemaphore, owner: object, hearing: Hearing
    ) -> None:
        """hearing: who waits for room is not silent."""
        self._large = large
        self._small = small
        self._owner = owner
        self._hearing = hearing
        self._frame = FrameBytes()
        """By the frame which is being read, and by all that are not done with, too:"""
        self._all = FrameBytes()
        self._admitted_s = 0.0
        """When a part of the frame that is being read was."""

    async def admit(self, num_bytes: int) -> None:
        """What many coordinators send at once does not take more than was promised."""
        is_large = num_bytes > SMALL_PART_BYTES
        self._hearing.not_listening()
        self._admitted_s = math.inf
        await (self._large if is_large else self._small).take(self._owner, num_bytes)
        self._hearing.listening()
        self._admitted_s = asyncio.get_running_loop().time()
        for taken in (self._frame, self._all):
            taken.add(num_bytes, is_large=is_large)

    def received(self) -> FrameBytes:
        """The frame that was being read is whole: what it takes, until that is given back."""
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
        """Once nobody has anything left to give back."""
        self.give_back(replace(self._all))

    async def until_too_slow(self) -> int:
        """Return when a large frame does not come in time, for whose room others wait: its bytes
        so far."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            late_s, large = loop.time() - self._admitted_s, self._frame.large
            if large and late_s > patience_s(self._hearing.silent_after_s, large):
                return large
