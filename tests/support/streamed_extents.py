"""Weights to stream: extents in a file in memory, page-aligned memory, and a place that knows its
content."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from edge.offload import ExtentSpan, Memory, Read, StoreError, piece_digest
from edge.offload.files.direct_reader import ReadsUnderWay

PAGE = 4096


def page_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)).cast("B")


class MemoryReader:
    """The file in memory; remembers what was asked for, and may be held up."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.offsets: list[int] = []
        self.bytes_read = 0
        self.version = 1
        self.gate = threading.Event()
        self.gate.set()
        self.failure: StoreError | None = None
        self.asked = threading.Semaphore(0)
        self.pool = ThreadPoolExecutor(1)

    def begin(self, reads: Sequence[Read]) -> ReadsUnderWay:
        self.asked.release()
        return ReadsUnderWay([self.pool.submit(self.read, reads)])

    def read(self, reads: Sequence[Read]) -> None:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        for each in reads:
            self.offsets.append(each.offset)
            self.bytes_read += each.nbytes
            each.into[: each.nbytes] = self.content[each.offset : each.offset + each.nbytes]

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.gate.set()
        self.pool.shutdown()


def content_of(extents: int, nbytes: int) -> bytes:
    return b"".join(bytes([number + 1]) * nbytes for number in range(extents))


def spans(extents: int, nbytes: int) -> list[list[ExtentSpan]]:
    return [
        [ExtentSpan(number * nbytes, nbytes, 0, 0, piece_digest(bytes([number + 1]) * nbytes))]
        for number in range(extents)
    ]


GONE = b"\xee"


class Places:
    """Memory for each extent; what is let go is overwritten, so that a use of it is noticed."""

    def __init__(self, extents: int, nbytes: int = PAGE) -> None:
        self.memory = [[page_memory(nbytes)] for _ in range(extents)]
        self.handed: list[tuple[int, int | None]] = []
        self.supplied: list[int] = []

    def supply(self, memory: Memory) -> None:
        self.supplied.append(self._number(memory))

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        assert memory is not to
        self.handed.append((self._number(memory), None if to is None else self._number(to)))
        for part in memory:
            part[:] = GONE * len(part)

    def _number(self, memory: Memory) -> int:
        return next(i for i, each in enumerate(self.memory) if each is memory)

    def held(self) -> list[int]:
        """Which extents are in memory, as far as one byte tells."""
        return [i for i, parts in enumerate(self.memory) if parts[0][0] == i + 1]
