"""Weights that do not fit, brought in from disk just before they are used, over and over.

A decoder uses its layers in the same order for every token. For such a cycle the best that any
replacement can do is to keep a fixed set and stream the rest through a small window: what was used
last is needed last, so least-recently-used would miss every time (Belady, 1966). Which layers are
fixed is decided elsewhere; here is the window.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.direct_reader import DIRECT_BYTES, Read
from offload.errors import StoreError


class Reader(Protocol):
    """Where the bytes come from."""

    bytes_read: int

    def read(self, reads: Sequence[Read]) -> None: ...

    def close(self) -> None: ...


Slot = Sequence[memoryview]
"""Writable memory for one extent, in one or more parts of whole pages."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of one extent: where it lies in the file, and where in a slot's memory."""

    offset: int
    nbytes: int
    part: int
    """Which of the slot's memories."""
    part_offset: int
    digest: str

    def read_into(self, slot: Slot, *, verify: bool = True) -> Read:
        """What brings it into the slot."""
        end = self.part_offset + padded(self.nbytes)
        return Read(
            offset=self.offset,
            into=slot[self.part][self.part_offset : end],
            nbytes=self.nbytes,
            digest=self.digest if verify else None,
        )


Extent = Sequence[Span]
"""What is brought in together: the weights of one layer."""


class WeightStreamer:
    """Extents in a cycle through a few slots; one thread reads ahead as far as slots are free.

    The n-th use is of extent n mod len(extents), and finds it in slot n mod len(slots). A slot is
    filled again as soon as its extent was used, so the disk works while others compute, and waits
    when every slot holds what is still to come. Extents that all have a slot are read once.
    """

    def __init__(self, extents: Sequence[Extent], slots: Sequence[Slot], reader: Reader) -> None:
        """Begins to read. Each slot has room for every extent; more slots than extents are no use.

        The first time around, bytes are compared with their digests. ValueError without extents or
        with too few slots: one is used while the next is filled.
        """
        if not extents or len(slots) < min(2, len(extents)):
            raise ValueError(f"{len(extents)} extents cannot go through {len(slots)} slots")
        self._extents = extents
        self._slots = slots[: len(extents)]
        self._reader = reader
        self._changed = threading.Condition()
        self._fetched = self._used = 0
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
    def extent(self, index: int) -> Iterator[int]:
        """The slot in which extent `index` lies, until the block ends. For one thread at a time.

        Raises StoreError when the disk fails or the file is not what was written, ValueError when
        it is not this extent's turn.
        """
        with self._changed:
            if index != self._used % len(self._extents):
                raise ValueError(f"extent {index} is used out of turn")
            start_s = time.perf_counter()
            self._changed.wait_for(lambda: self._fetched > self._used or self._is_over)
            self.wait_s += time.perf_counter() - start_s
            if self._failure is not None:
                raise self._failure
            if self._fetched <= self._used:
                raise StoreError("the weights are no longer read; the model was closed")
            slot = self._used % len(self._slots)
        try:
            yield slot
        finally:
            with self._changed:
                self._used += 1
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

    def _run(self) -> None:
        is_resident = len(self._extents) == len(self._slots)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_over or self._fetched - self._used < len(self._slots)
                )
                if self._is_over:
                    return
                number = self._fetched
            if not (is_resident and number >= len(self._extents)):
                try:
                    self._fetch(number)
                except BaseException as error:  # whoever waits must not wait for ever
                    with self._changed:
                        self._failure = _as_store_error(error)
                        self._changed.notify_all()
                    return
            with self._changed:
                self._fetched += 1
                self._changed.notify_all()

    def _fetch(self, number: int) -> None:
        slot = self._slots[number % len(self._slots)]
        is_first = number < len(self._extents)
        extent = self._extents[number % len(self._extents)]
        self._reader.read([span.read_into(slot, verify=is_first) for span in extent])


def _as_store_error(error: BaseException) -> StoreError:
    if isinstance(error, StoreError):
        return error
    failure = StoreError(f"the weights cannot be read: {error}")
    failure.__cause__ = error
    return failure


def padded(nbytes: int) -> int:
    """To whole blocks of direct reads."""
    return -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES
