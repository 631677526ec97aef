"""Reads extents into memory, and checks them against their digests.

`weight_streamer.py` decides which layers are read and when, and `expert_cache.py` which experts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge.offload.errors import StoreError
from edge.offload.files.direct_reader import Read
from edge.system.files import DIRECT_BYTES


class BegunReads(Protocol):
    """Reads that have begun."""

    def wait(self) -> None: ...


class ExtentReader(Protocol):
    """The source of the bytes."""

    bytes_read: int

    @property
    def version(self) -> object:
        """Changes with each write to the file; never None."""

    def begin(self, reads: Sequence[Read]) -> BegunReads: ...

    def close(self) -> None: ...


Memory = Sequence[memoryview]
"""Writable memory for one extent, in one or more parts of whole pages."""


class Pages(Protocol):
    """Supplies the pages of memory."""

    def supply(self, memory: Memory) -> None:
        """Give the memory pages before it is written, unless it has some."""

    def hand_on(self, memory: Memory, to: Memory | None) -> None:
        """Move the pages of the memory to `to`, which is written next, or free them."""


@dataclass(frozen=True, slots=True)
class ExtentSpan:
    """A run of bytes of one extent: its place in the file, and in the extent's memory."""

    offset: int
    nbytes: int
    part: int
    """Index into the parts of the extent's memory."""
    part_offset: int
    digest: str

    def read_into(self, memory: Memory, *, verify: bool = True) -> Read:
        """The read of the span into its place in `memory`."""
        end = self.part_offset + padded(self.nbytes)
        return Read(
            offset=self.offset,
            into=memory[self.part][self.part_offset : end],
            nbytes=self.nbytes,
            digest=self.digest if verify else None,
        )


Extent = Sequence[ExtentSpan]
"""Bytes that are read together: the weights of one layer, or of one expert."""


class CheckedExtents:
    """Extents by number, read into memory that the caller gives.

    An extent's bytes are compared with their digests the first time, and whenever the file was
    written to since. Callers hold `lock` for `begin` and `check`, and not for `wait`.
    """

    def __init__(
        self, extents: Sequence[Extent], reader: ExtentReader, lock: threading.Lock
    ) -> None:
        self._extents = extents
        self._lock = lock
        self._reader = reader
        self._verified: list[object] = [None] * len(extents)
        """The version of the file in which each extent was verified; or None."""
        self._asked: dict[int, tuple[object, bool]] = {}
        """Extents that were read but not used yet: version of the file, and whether verified."""
        self.wait_s = 0.0
        """Seconds that users waited for the disk."""
        self._failure: StoreError | None = None
        self.is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether a read failed, or the extents were closed."""
        return self.is_closed or self._failure is not None

    def check(self) -> None:
        """Raises StoreError if a read failed, or after `close`."""
        if self._failure is not None:
            raise self._failure
        if self.is_closed:
            raise closed_error()

    def begin(self, index: int, memory: Memory) -> BegunReads:
        """Start to read the extent."""
        version = self._reader.version
        is_compared = self._verified[index] != version
        self._asked[index] = version, is_compared
        return self._read(index, memory, verify=is_compared)

    def wait(self, index: int, begun: BegunReads, memory: Memory) -> None:
        """Wait until the extent is in `memory`. Reads it again if the file was written to.

        Raises StoreError if the disk fails or the file has changed, or after `close`.
        """
        self._wait(begun)
        with self._lock:
            self.check()
            again = self._again(index, memory)
        if again is not None:
            self._wait(again)
        if self.is_closed:
            raise closed_error()

    def close(self) -> None:
        """End all waits, now and later, with a StoreError. Does not close the reader."""
        with self._lock:
            self.is_closed = True
        self._failure = None  # its traceback would keep waiting frames and weights alive

    def _again(self, index: int, memory: Memory) -> BegunReads | None:
        version, is_compared = self._asked.pop(index, (None, True))
        if version is None:
            return None  # it was in memory before
        again = None
        if not is_compared and version != self._reader.version:
            version = self._reader.version
            again = self._read(index, memory, verify=True)
        self._verified[index] = version
        return again

    def _wait(self, begun: BegunReads) -> None:
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

    def _read(self, index: int, memory: Memory, *, verify: bool) -> BegunReads:
        return self._reader.begin(
            [span.read_into(memory, verify=verify) for span in self._extents[index]]
        )


def closed_error() -> StoreError:
    return StoreError("the weights are no longer read; the model was closed")


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole blocks of direct reads."""
    return -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES
