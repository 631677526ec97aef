"""Weights that do not fit, brought in from disk just before they are used, over and over.

A decoder uses its layers in the same order for every token. For such a cycle the best that any
replacement can do is to keep a fixed set and stream the rest through a small window: what was used
last is needed last, so least-recently-used would miss every time (Belady, 1966). How many are
fixed is decided elsewhere, and may change at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.direct_reader import DIRECT_BYTES, Read
from offload.errors import StoreError


class Reader(Protocol):
    """Where the bytes come from."""

    bytes_read: int

    def read(self, reads: Sequence[Read]) -> None: ...

    def close(self) -> None: ...


Memory = Sequence[memoryview]
"""Writable, for one extent, in one or more parts of whole pages."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of one extent: where it lies in the file, and where in its memory."""

    offset: int
    nbytes: int
    part: int
    """Of the extent's memory."""
    part_offset: int
    digest: str

    def read_into(self, memory: Memory, *, verify: bool = True) -> Read:
        """What brings it there."""
        end = self.part_offset + padded(self.nbytes)
        return Read(
            offset=self.offset,
            into=memory[self.part][self.part_offset : end],
            nbytes=self.nbytes,
            digest=self.digest if verify else None,
        )


Extent = Sequence[Span]
"""What is brought in together: the weights of one layer."""


class WeightStreamer:
    """Extents in a cycle, each with memory of its own; one thread reads ahead of who uses them.

    The first `resident` of them stay once they are read. The others are let go as soon as they were
    used, and no more than `window` of them are held at once: so the disk works while others
    compute, and waits when the window is full of what is still to come. Where so few are not
    resident that the window holds them, they stay, too.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        memories: Sequence[Memory],
        reader: Reader,
        *,
        resident: int,
        window: int,
        let_go: Callable[[Memory], None],
    ) -> None:
        """Begins to read. `let_go` gives the system back what an extent's memory holds.

        The first time, an extent's bytes are compared with their digests. ValueError without
        extents, or for a window of one: one is used while the next is filled.
        """
        if not extents or len(memories) != len(extents) or window < 2:
            raise ValueError(f"{len(extents)} extents cannot go through a window of {window}")
        self._extents = extents
        self._memories = memories
        self._reader = reader
        self._window = window
        self._let_go = let_go
        self._changed = threading.Condition()
        self._resident = self._kept(resident)
        self._is_filled = [False] * len(extents)
        self._is_verified = [False] * len(extents)
        self._in_use: int | None = None
        self._fetched = self._used = 0
        """Uses, counted from the start: what comes next for the disk, and for who computes."""
        self._failure: StoreError | None = None
        self._is_closed = False
        self.wait_s = 0.0
        """Seconds that users waited for the disk."""
        self._thread = threading.Thread(target=self._run, name="edge-stream", daemon=True)
        self._thread.start()

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
        with self._changed:
            if index != self._used % len(self._extents):
                raise ValueError(f"extent {index} is used out of turn")
            start_s = time.perf_counter()
            self._changed.wait_for(lambda: self._is_filled[index] or self._is_over)
            self.wait_s += time.perf_counter() - start_s
            if self._failure is not None:
                raise self._failure
            if not self._is_filled[index]:
                raise StoreError("the weights are no longer read; the model was closed")
            self._in_use = index
        try:
            yield
        finally:
            with self._changed:
                self._in_use = None
                self._used += 1
                self._fetched = max(self._fetched, self._used)
                if index >= self._resident:
                    self._drop(index)
                self._changed.notify_all()

    def keep(self, resident: int, *, window: int) -> None:
        """From now on so many extents stay; what is too much is let go before this returns.

        But for the extent in use, which is let go after its use. From any thread.
        """
        with self._changed:
            self._window = window
            self._resident = self._kept(resident)
            for index in range(self._resident, len(self._extents)):
                if self._is_filled[index] and index != self._in_use:
                    self._drop(index)
            # What was read ahead is gone, and is needed first.
            self._fetched = self._used
            self._changed.notify_all()

    def close(self) -> None:
        """End the reading; whoever waits for an extent gets a StoreError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._reader.close()
        self._failure = None  # its traceback would keep whoever waited, and the weights, alive

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._failure is not None

    def _kept(self, resident: int) -> int:
        count = len(self._extents)
        return count if count - resident <= self._window else max(0, resident)

    def _drop(self, index: int) -> None:
        self._is_filled[index] = False
        self._let_go(self._memories[index])

    @property
    def _may_fetch(self) -> bool:
        """Whether the next extent in turn has room, or is there already."""
        if self._fetched - self._used >= len(self._extents):
            return False
        index = self._fetched % len(self._extents)
        held = sum(self._is_filled[self._resident :])
        return index < self._resident or self._is_filled[index] or held < self._window

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._may_fetch)
                if self._is_over:
                    return
                index = self._fetched % len(self._extents)
                if self._is_filled[index]:
                    self._fetched += 1
                    continue
            try:
                is_first = not self._is_verified[index]
                memory = self._memories[index]
                self._reader.read(
                    [span.read_into(memory, verify=is_first) for span in self._extents[index]]
                )
            except BaseException as error:  # whoever waits must not wait for ever
                with self._changed:
                    self._failure = _as_store_error(error)
                    self._changed.notify_all()
                return
            with self._changed:
                self._is_filled[index] = self._is_verified[index] = True
                self._changed.notify_all()


def _as_store_error(error: BaseException) -> StoreError:
    if isinstance(error, StoreError):
        return error
    failure = StoreError(f"the weights cannot be read: {error}")
    failure.__cause__ = error
    return failure


def padded(nbytes: int) -> int:
    """To whole blocks of direct reads."""
    return -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES
