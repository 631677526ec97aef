"""Weight offload: reads layers that do not fit into memory just before their use.

A decoder uses its layers in the same order for every token. For such a cycle the best policy keeps
a fixed set and streams the rest through a small window; least-recently-used would miss every time
(Belady, 1966). The fixed layers are spread among the others, so that the disk has time to read
(`resident_layers.py`). Callers set their number, and may change it at any time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from edge.offload.errors import StoreError
from edge.offload.streaming.checked_extents import (
    BegunReads,
    CheckedExtents,
    Extent,
    ExtentReader,
    Memory,
    Pages,
)
from edge.offload.streaming.resident_layers import is_streamed


class WeightStreamer:
    """Extents in a cycle, each with its own memory, read as soon as there is room.

    The `resident` extents, spread over the cycle, stay once they are read. Others are released
    after each use; at most `window` of them are held or being read at once. The next reads start
    while earlier ones run, so the disk waits only for a full window. If the window holds all
    extents that are not resident, they stay, too.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        memories: Sequence[Memory],
        reader: ExtentReader,
        *,
        resident: int,
        window: int,
        pages: Pages,
    ) -> None:
        """Begin to read.

        An extent's bytes are compared with their digests the first time, and whenever the file was
        written to since. Raises ValueError without extents, or for a window of one, because one
        extent is used while the next is read.
        """
        if not extents or len(memories) != len(extents) or window < 2:
            raise ValueError(f"{len(extents)} extents cannot go through a window of {window}")
        self._memories = memories
        self._reader = reader
        self._mutex = threading.Lock()
        self._checked = CheckedExtents(extents, reader, self._mutex)
        self._window = window
        self._pages = pages
        self._streamed = self._not_kept(resident)
        self._begun: dict[int, BegunReads] = {}
        """Extents that are in memory or being read."""
        self._in_use: int | None = None
        self._used = 0
        """Number of uses so far."""
        self._begin_ahead()

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far."""
        return self._reader.bytes_read

    @property
    def wait_s(self) -> float:
        """Seconds that users waited for the disk."""
        return self._checked.wait_s

    @contextlib.contextmanager
    def extent(self, index: int) -> Iterator[None]:
        """Context in which extent `index` is in its memory. For one thread at a time.

        Raises StoreError if the disk fails or the file has changed, ValueError if it is not this
        extent's turn.
        """
        with self._mutex:
            if index != self._used % len(self._memories):
                raise ValueError(f"extent {index} is used out of turn")
            self._checked.check()
            begun = self._begun[index]
            self._in_use = index
        self._checked.wait(index, begun, self._memories[index])
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
        """Keep `resident` extents from now on; others are released before this returns.

        The extent in use is released after its use. Called from any thread.
        """
        with self._mutex:
            self._streamed = self._not_kept(resident)
            for index in [each for each in self._begun if self._is_streamed(each)]:
                if index != self._in_use:
                    with contextlib.suppress(StoreError):  # raised when it is read again
                        self._begun.pop(index).wait()
                    self._pages.hand_on(self._memories[index], None)
            self._begin_ahead()

    def close(self) -> None:
        """Stop reading. Waits for extents end with a StoreError."""
        self._checked.close()
        self._reader.close()

    def _not_kept(self, resident: int) -> int:
        count = len(self._memories)
        return 0 if count - resident <= self._window else min(count, count - resident)

    def _is_streamed(self, index: int) -> bool:
        return is_streamed(index, len(self._memories), self._streamed)

    def _coming(self) -> Iterator[int]:
        """The extents to read next, in the order of use, for which there is room."""
        count = len(self._memories)
        room = self._window - sum(self._is_streamed(index) for index in self._begun)
        for number in range(self._used, self._used + count):
            index = number % count
            if index not in self._begun:
                if self._is_streamed(index):
                    if room <= 0:
                        return  # later extents must not take its room
                    room -= 1
                yield index

    def _next_memory(self) -> Memory | None:
        index = next(self._coming(), None)
        return None if index is None else self._memories[index]

    def _begin_ahead(self) -> None:
        if self._checked.is_closed:
            return
        for index in list(self._coming()):
            self._pages.supply(self._memories[index])
            self._begun[index] = self._checked.begin(index, self._memories[index])
