"""Extents through places on a device: in order, each in its place, never over one in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.offload import (
    DeviceWindow,
    ExtentSpan,
    HostSlots,
    Mark,
    Memory,
    MemoryCopier,
    Read,
    StoreError,
    WeightStreamer,
    is_streamed,
)
from edge.offload.files.direct_reader import ReadsUnderWay

PAGE = 4096
GONE = 0xEE
PATIENCE_S = 60.0
"""Only what hangs takes as long."""


class Disk:
    """Extent i is a page of i + 1. Reading may be held up, or fail."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.version = 1
        self.failure: StoreError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.pool = ThreadPoolExecutor(1)

    def begin(self, reads: Sequence[Read]) -> ReadsUnderWay:
        return ReadsUnderWay([self.pool.submit(self.read, each) for each in reads])

    def read(self, read: Read) -> None:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.bytes_read += read.nbytes
        read.into[:] = bytes([read.offset // PAGE + 1]) * len(read.into)

    def close(self) -> None:
        self.gate.set()
        self.pool.shutdown(cancel_futures=True)


class WatchedCopier(MemoryCopier):
    """Remembers what was copied, and that no place in use was overwritten."""

    def __init__(self, places: Sequence[memoryview]) -> None:
        super().__init__(places)
        self.in_use: int | None = None
        self.copies: list[int] = []
        self.copied = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.is_closed = False

    def copy(self, memory: Memory, place: int, nbytes: int, *, after: Mark) -> Mark:
        if self.failure is not None:
            raise self.failure
        assert place != self.in_use, "overwritten while in use"
        self.copies.append(place)
        super().copy(memory, place, nbytes, after=after)
        self.copied.release()
        return None

    def close(self) -> None:
        self.is_closed = True


class Bed:
    def __init__(self, extents: int, *, places: int, pinned: int, staging: int) -> None:
        self.disk = Disk()
        self.places = [memoryview(bytearray(PAGE)) for _ in range(places)]
        self.copier = WatchedCopier(self.places)
        self.pins: list[str] = []
        self.slots = HostSlots(PAGE, pin=self._pin)
        memories = [self.slots.memory() for _ in range(extents)]
        spans = [[ExtentSpan(i * PAGE, PAGE, 0, 0, "")] for i in range(extents)]
        self.extents = extents
        streamer = WeightStreamer(
            spans, memories, self.disk, resident=pinned, window=staging, pages=self.slots
        )

        def stays(index: int) -> bool:
            return not is_streamed(index, extents, extents - pinned)

        self.window = DeviceWindow(
            streamer, memories, [PAGE] * extents, self.copier, places=places, stays=stays
        )

    def _pin(self, memory: memoryview) -> Callable[[], None]:
        self.pins.append("pin")
        return lambda: self.pins.append("unpin")

    def use(self, index: int) -> None:
        self.window.begin(index)
        place = index % len(self.places)
        self.copier.in_use = place
        assert bytes(self.places[place]) == bytes([index + 1]) * PAGE
        self.copier.in_use = None
        self.places[place][:] = bytes([GONE]) * PAGE  # nobody may take it for something else
        self.window.end(index)

    def use_all(self, *, passes: int) -> None:
        for number in range(passes * self.extents):
            self.use(number % self.extents)

    def close(self) -> None:
        self.window.close()
        self.slots.close()


@contextmanager
def bed(extents: int, *, places: int = 2, pinned: int = 0, staging: int = 2) -> Iterator[Bed]:
    made = Bed(extents, places=places, pinned=pinned, staging=staging)
    try:
        yield made
    finally:
        made.close()


@given(
    extents=st.integers(3, 9),
    places=st.integers(2, 4),
    pinned=st.integers(0, 9),
    staging=st.integers(2, 3),
    passes=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_every_use_finds_its_extent(
    extents: int, places: int, pinned: int, staging: int, passes: int
) -> None:
    places, pinned = min(places, extents - 1), min(pinned, extents)
    with bed(extents, places=places, pinned=pinned, staging=staging) as made:
        made.use_all(passes=passes)
        on_disk = extents - pinned
        if on_disk > staging:
            assert made.slots.num_slots <= pinned + staging
            uses = passes * on_disk + pinned
            assert made.disk.bytes_read <= (uses + places + staging) * PAGE
        assert made.copier.copies[:extents] == [i % places for i in range(extents)]
    assert made.copier.is_closed
    assert made.pins.count("pin") == made.pins.count("unpin"), "nothing stays pinned"


def test_copies_go_ahead_as_far_as_there_are_places() -> None:
    """And no farther, however long the user takes: the first place is not free before its end."""
    with bed(5, places=3, pinned=5) as made:
        made.window.begin(0)
        for _ in range(3):
            assert made.copier.copied.acquire(timeout=PATIENCE_S)
        assert made.copier.copies == [0, 1, 2]
        made.window.end(0)
        assert made.copier.copied.acquire(timeout=PATIENCE_S)
        assert made.copier.copies == [0, 1, 2, 0]


def test_uses_out_of_turn_are_refused() -> None:
    with bed(3) as made:
        with pytest.raises(ValueError, match="extent 1 is used out of turn"):
            made.window.begin(1)
        made.window.begin(0)
        with pytest.raises(ValueError, match="extent 1 is used out of turn"):
            made.window.begin(1)  # the first is not over
        made.window.end(0)
        made.use(1)


@pytest.mark.parametrize("who", ["disk", "copier"])
def test_what_fails_is_told_to_who_waits_for_it(who: str) -> None:
    with bed(4) as made:
        if who == "disk":
            made.disk.failure = StoreError("the disk failed")
        else:
            made.copier.failure = RuntimeError("no such device")
        with pytest.raises(StoreError, match=r"the disk failed|cannot be copied: no such device"):
            made.use_all(passes=2)


def test_closing_ends_a_wait_for_the_disk() -> None:
    with bed(4) as made:
        made.use(0)
        made.use(1)
        made.disk.gate.clear()

        def use_on() -> None:
            for number in range(2, 12):
                made.use(number % 4)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(use_on)
            made.window.close()
            with pytest.raises(StoreError, match="no longer read"):
                waiting.result(timeout=PATIENCE_S)


@pytest.mark.parametrize(("extents", "places"), [(3, 3), (3, 1), (1, 2)])
def test_windows_that_make_no_sense_are_refused(extents: int, places: int) -> None:
    with pytest.raises(ValueError, match="do not stream through"):
        DeviceWindow(
            None,  # type: ignore[arg-type]
            [],
            [PAGE] * extents,
            MemoryCopier([]),
            places=places,
            stays=bool,
        )
