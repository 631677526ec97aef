"""Weights that do not fit, brought in from disk just before they are used, over and over.

A decoder uses its layers in the same order for every token. For such a cycle the best that any
replacement can do is to keep a fixed set and stream the rest through a small window: what was used
last is needed last, so least-recently-used would miss every time (Belady, 1966). Which are fixed
does not matter to what is read; it does to when: spread among the others, they give the disk the
time that it needs (see `is_streamed`). How many are fixed is decided elsewhere, and may change at
any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge.offload.errors import StoreError
from edge.offload.files.direct_reader import DIRECT_BYTES, Read


class Begun(Protocol):
    """Reads under way."""

    def wait(self) -> None: ...


class Reader(Protocol):
    """The source of the bytes."""

    bytes_read: int

    @property
    def version(self) -> object:
        """Another one after each write to what is read; never None."""

    def begin(self, reads: Sequence[Read]) -> Begun: ...

    def close(self) -> None: ...


Memory = Sequence[memoryview]
"""Writable, for one extent, in one or more parts of whole pages."""


class Pages(Protocol):
    """The pages that memory is made of."""

    def supply(self, memory: Memory) -> None:
        """The memory is written next; it may have pages already."""

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        """Empty the memory: its pages go to another, which is written next, or to the system."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of one extent: where it lies in the file, and where in its memory."""

    offset: int
    nbytes: int
    part: int
    """Index into the parts of the extent's memory."""
    part_offset: int
    digest: str

    def read_into(self, memory: Memory, *, verify: bool = True) -> Read:
        """The read that brings it there."""
        end = self.part_offset + padded(self.nbytes)
        return Read(
            offset=self.offset,
            into=memory[self.part][self.part_offset : end],
            nbytes=self.nbytes,
            digest=self.digest if verify else None,
        )


Extent = Sequence[Span]
"""Bytes that are brought in together: the weights of one layer."""


def is_streamed(index: int, count: int, streamed: int) -> bool:
    """Whether that extent of `count` is one of the `streamed`, which lie as evenly as can be.

    Between two of them then lies the computing of as few others as can be, and a window of two
    keeps the disk busy wherever any window could: while one is used, and the resident ones behind
    it, the other is read. Where that takes the disk less time, it is not what the step waits for.
    """
    return (index + 1) * streamed // count > index * streamed // count


class WeightStreamer:
    """Extents in a cycle, each with memory of its own, read as soon as there is room for them.

    As many as are `resident` stay once they are read, spread over the cycle. The others are let go
    as soon as they were used, and no more than `window` of them are held or on their way at once.
    What comes next is asked for while what came before is still being read: so the disk never
    waits, but for a window that is full of what is still to come. Where so few are not resident
    that the window holds them, they stay, too.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        memories: Sequence[Memory],
        reader: Reader,
        *,
        resident: int,
        window: int,
        pages: Pages,
    ) -> None:
        """Begins to read.

        An extent's bytes are compared with their digests the first time, and whenever the file was
        written to since. ValueError without extents, or for a window of one: one is used while the
        next is filled.
        """
        if not extents or len(memories) != len(extents) or window < 2:
            raise ValueError(f"{len(extents)} extents cannot go through a window of {window}")
        self._extents = extents
        self._memories = memories
        self._reader = reader
        self._window = window
        self._pages = pages
        self._mutex = threading.Lock()
        self._streamed = self._not_kept(resident)
        self._begun: dict[int, Begun] = {}
        """Extents that are in memory or on their way there."""
        self._verified: list[object] = [None] * len(extents)
        """The version of the file in which the bytes were what their digests say; or None."""
        self._asked: dict[int, tuple[object, bool]] = {}
        """Extents that were not used since: in which version, and whether they are compared."""
        self._in_use: int | None = None
        self._used = 0
        """Uses, counted from the start."""
        self._failure: StoreError | None = None
        self._is_closed = False
        self.wait_s = 0.0
        """Seconds that users waited for the disk."""
        self._begin_ahead()

    @property
    def bytes_read(self) -> int:
        """From the disk, since the streamer was made."""
        return self._reader.bytes_read

    @contextlib.contextmanager
    def extent(self, index: int) -> Iterator[None]:
        """Extent `index` is in its memory until the block ends. For one thread at a time.

        Raises StoreError when the disk fails or the file is not what was written, ValueError when
        it is not this extent's turn.
        """
        with self._mutex:
            if index != self._used % len(self._extents):
                raise ValueError(f"extent {index} is used out of turn")
            if self._failure is not None:
                raise self._failure
            begun = None if self._is_closed else self._begun[index]
            self._in_use = index
        if begun is not None:
            self._wait(begun)
        with self._mutex:
            again = None if self._is_closed else self._again(index)
        if again is not None:
            self._wait(again)
        if begun is None or self._is_closed:
            raise StoreError("the weights are no longer read; the model was closed")
        try:
            yield
        finally:
            with self._mutex:
                self._in_use = None
                self._used += 1
                if self._is_streamed(index):
                    del self._begun[index]
                    self._pages.hand_on(self._memories[index], self._next_memory())
                self._begin_ahead()

    def keep(self, resident: int) -> None:
        """From now on `resident` extents stay; any more are let go before this returns.

        But for the extent in use, which is let go after its use. From any thread.
        """
        with self._mutex:
            self._streamed = self._not_kept(resident)
            for index in [each for each in self._begun if self._is_streamed(each)]:
                if index != self._in_use:
                    with contextlib.suppress(StoreError):  # told when it is read again
                        self._begun.pop(index).wait()
                    self._pages.hand_on(self._memories[index], None)
            self._begin_ahead()

    def close(self) -> None:
        """End the reading; whoever waits for an extent gets a StoreError."""
        with self._mutex:
            self._is_closed = True
        self._reader.close()
        self._failure = None  # its traceback would keep whoever waited, and the weights, alive

    def _wait(self, begun: Begun) -> None:
        start_s = time.perf_counter()
        try:
            begun.wait()
        except StoreError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = StoreError(f"the weights cannot be read: {error}")
            raise self._failure from error
        finally:
            self.wait_s += time.perf_counter() - start_s

    def _again(self, index: int) -> Begun | None:
        """The extent was read. Once more, and compared, if the file was written to meanwhile."""
        version, is_compared = self._asked.pop(index, (None, True))
        if version is None:
            return None  # it is in memory since another use
        again = None
        if not is_compared and version != self._reader.version:
            version = self._reader.version
            again = self._read(index, verify=True)
        self._verified[index] = version
        return again

    def _read(self, index: int, *, verify: bool) -> Begun:
        memory = self._memories[index]
        return self._reader.begin(
            [span.read_into(memory, verify=verify) for span in self._extents[index]]
        )

    def _not_kept(self, resident: int) -> int:
        count = len(self._extents)
        return 0 if count - resident <= self._window else min(count, count - resident)

    def _is_streamed(self, index: int) -> bool:
        return is_streamed(index, len(self._extents), self._streamed)

    def _coming(self) -> Iterator[int]:
        """The extents to read next, in the order of use, as far as there is room."""
        count = len(self._extents)
        room = self._window - sum(self._is_streamed(index) for index in self._begun)
        for number in range(self._used, self._used + count):
            index = number % count
            if index not in self._begun:
                if self._is_streamed(index):
                    if room <= 0:
                        return  # what comes later must not take its place
                    room -= 1
                yield index

    def _next_memory(self) -> Memory | None:
        index = next(self._coming(), None)
        return None if index is None else self._memories[index]

    def _begin_ahead(self) -> None:
        if self._is_closed:
            return
        for index in list(self._coming()):
            self._pages.supply(self._memories[index])
            version = self._reader.version
            is_compared = self._verified[index] != version
            self._asked[index] = version, is_compared
            self._begun[index] = self._read(index, verify=is_compared)


def padded(nbytes: int) -> int:
    """To whole blocks of direct reads."""
    return -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES
