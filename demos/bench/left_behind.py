"""What faults leave behind on peers that outlived them: models, threads, descriptors, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from edge.protocol.peer_info import describe_all
from edge.transport import Credentials

FREE_WITHIN_S = 30.0
"""A peer hears of a coordinator that was cut off after 20 s of silence."""
_LOOK_EVERY_S = 0.1

SLACK = 4
"""Threads and descriptors that may come and go: pools that grow once, a connection just made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """By one process."""

    threads: int
    descriptors: int
    memory_bytes: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        return cls(
            threads=process.num_threads(),
            descriptors=process.num_fds(),
            memory_bytes=process.memory_info().rss,
        )


@dataclass(slots=True)
class Watch:
    """Compares processes with what they held after their first model."""

    first: dict[int, Held] = field(default_factory=dict)
    last: dict[int, Held] = field(default_factory=dict)
    """Both by process id."""

    async def left(
        self, addresses: Sequence[str], processes: Sequence[int], credentials: Credentials | None
    ) -> list[str]:
        """What is still there when no model is, in words; waits until nothing is, or for
        FREE_WITHIN_S."""
        until_s, asked = time.monotonic() + FREE_WITHIN_S, dict.fromkeys(addresses, credentials)
        while True:
            infos, failures = await describe_all(asked)
            found = [str(failure) for failure in failures]
            for info in infos:
                found += [f"peer {info.name} holds {model.held}" for model in info.models]
                if info.free_bytes != info.memory_bytes - info.floor_bytes:
                    found.append(f"peer {info.name} has memory reserved for nothing")
            found = found or [each for pid in processes for each in self._more(pid)]
            if not found or time.monotonic() > until_s:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    def _more(self, pid: int) -> Iterator[str]:
        now = Held.by(psutil.Process(pid))
        before = self.first.setdefault(pid, now)
        self.last[pid] = now
        for what in ("threads", "descriptors"):
            was, is_now = getattr(before, what), getattr(now, what)
            if is_now > was + SLACK:
                yield f"process {pid}: {was} {what} have become {is_now}"

    def growth_bytes(self) -> list[int]:
        """Growth of the memory of each process that was looked at more than once."""
        return [
            self.last[pid].memory_bytes - first.memory_bytes
            for pid, first in self.first.items()
            if self.last[pid] is not first
        ]
