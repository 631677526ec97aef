"""Weights through a window: each extent in its turn, read no more often than must be."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import (
    DirectReader,
    Read,
    Span,
    StoreCorruptError,
    StoreError,
    WeightStreamer,
    piece_digest,
)

PAGE = 4096
PATIENCE_S = 60.0
"""Only what hangs takes as long."""


def page_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)).cast("B")


class MemoryReader:
    """The file in memory; remembers what was asked for, and may be held up."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.offsets: list[int] = []
        self.bytes_read = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failure: StoreError | None = None
        self.asked = threading.Semaphore(0)

    def read(self, reads: Sequence[Read]) -> None:
        self.asked.release()
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        for each in reads:
            self.offsets.append(each.offset)
            self.bytes_read += each.nbytes
            each.into[: each.nbytes] = self.content[each.offset : each.offset + each.nbytes]

    def close(self) -> None:
        self.gate.set()


def content_of(extents: int, nbytes: int) -> bytes:
    return b"".join(bytes([number]) * nbytes for number in range(extents))


def spans(extents: int, nbytes: int) -> list[list[Span]]:
    return [
        [Span(number * nbytes, nbytes, 0, 0, piece_digest(bytes([number]) * nbytes))]
        for number in range(extents)
    ]


@given(extents=st.integers(1, 7), slots=st.integers(1, 9), passes=st.integers(1, 4))
@settings(max_examples=40)
def test_every_use_finds_its_extent(extents: int, slots: int, passes: int) -> None:
    if slots < min(2, extents):
        return
    reader = MemoryReader(content_of(extents, PAGE))
    memory = [[page_memory(PAGE)] for _ in range(slots)]
    streamer = WeightStreamer(spans(extents, PAGE), memory, reader)
    try:
        for _ in range(passes):
            for index in range(extents):
                with streamer.extent(index) as slot:
                    assert bytes(memory[slot][0]) == bytes([index]) * PAGE
    finally:
        streamer.close()
    if slots >= extents:
        assert reader.offsets == [index * PAGE for index in range(extents)]
    else:
        in_turn = [n % extents * PAGE for n in range(extents * passes + slots)]
        assert reader.offsets == in_turn[: len(reader.offsets)]
        assert len(reader.offsets) >= extents * passes


def test_reads_ahead_as_far_as_slots_are_free_and_no_further() -> None:
    reader = MemoryReader(content_of(5, PAGE))
    streamer = WeightStreamer(spans(5, PAGE), [[page_memory(PAGE)] for _ in range(3)], reader)
    try:
        for _ in range(3):
            assert reader.asked.acquire(timeout=PATIENCE_S)
        with streamer.extent(0):
            pass
        assert reader.asked.acquire(timeout=PATIENCE_S)  # the slot that became free
        with streamer.extent(1), streamer_is_idle(reader):
            pass
        assert reader.asked.acquire(timeout=PATIENCE_S)
    finally:
        streamer.close()
    assert reader.offsets == [index * PAGE for index in range(5)]


class streamer_is_idle:
    """No read is asked for while the block runs: the extent in use keeps its slot."""

    def __init__(self, reader: MemoryReader) -> None:
        self.reader = reader

    def __enter__(self) -> None:
        assert not self.reader.asked.acquire(blocking=False)

    def __exit__(self, *_: object) -> None:
        assert not self.reader.asked.acquire(blocking=False)


def test_a_use_out_of_turn_is_refused() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    streamer = WeightStreamer(spans(3, PAGE), [[page_memory(PAGE)] for _ in range(2)], reader)
    try:
        with pytest.raises(ValueError, match="out of turn"), streamer.extent(1):
            pass
    finally:
        streamer.close()


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot go through"):
        WeightStreamer(spans(2, PAGE), [[page_memory(PAGE)]], MemoryReader(b""))
    with pytest.raises(ValueError, match="cannot go through"):
        WeightStreamer([], [[page_memory(PAGE)]], MemoryReader(b""))


def test_a_failing_disk_reaches_the_user() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.gate.clear()
    reader.failure = StoreError("the disk has gone")
    streamer = WeightStreamer(spans(3, PAGE), [[page_memory(PAGE)] for _ in range(2)], reader)
    try:
        reader.gate.set()
        with pytest.raises(StoreError, match="the disk has gone"), streamer.extent(0):
            pass
    finally:
        streamer.close()


def test_closing_frees_a_user_that_waits() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.gate.clear()
    streamer = WeightStreamer(spans(3, PAGE), [[page_memory(PAGE)] for _ in range(2)], reader)
    raised: list[StoreError] = []

    def use() -> None:
        try:
            with streamer.extent(0):
                raise AssertionError("it was never read")
        except StoreError as error:
            raised.append(error)

    user = threading.Thread(target=use)
    user.start()
    closer = threading.Thread(target=streamer.close)
    closer.start()
    user.join()  # although the disk still hangs
    reader.gate.set()
    closer.join()
    assert "closed" in str(raised[0])


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, np.ndarray]:
    content = np.random.default_rng(1).integers(256, size=3 * PAGE + 100, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(content.tobytes())
    return path, content


def test_reads_a_file_in_parallel(weights: tuple[Path, np.ndarray]) -> None:
    path, content = weights
    reader = DirectReader(path, threads=3)
    memory = page_memory(4 * PAGE)
    reads = [
        Read(0, memory[:PAGE], PAGE, piece_digest(content[:PAGE].data)),
        Read(PAGE, memory[PAGE : 3 * PAGE], 2 * PAGE),
        Read(3 * PAGE, memory[3 * PAGE :], 100, piece_digest(content[3 * PAGE :].data)),
    ]
    try:
        reader.read(reads)
        assert bytes(memory[: len(content)]) == content.tobytes()
        assert reader.bytes_read == 4 * PAGE
    finally:
        reader.close()


def test_other_bytes_than_were_written_are_refused(weights: tuple[Path, np.ndarray]) -> None:
    path, _content = weights
    reader = DirectReader(path)
    try:
        with pytest.raises(StoreCorruptError, match="other bytes at 0"):
            reader.read([Read(0, page_memory(PAGE), PAGE, "0" * 64)])
    finally:
        reader.close()


def test_a_file_cut_short_is_refused(weights: tuple[Path, np.ndarray]) -> None:
    path, _content = weights
    reader = DirectReader(path)
    with path.open("r+b") as file:
        file.truncate(PAGE)
    try:
        with pytest.raises(StoreCorruptError, match="ends before byte"):
            reader.read([Read(0, page_memory(2 * PAGE), 2 * PAGE)])
    finally:
        reader.close()


def test_a_file_cut_short_within_a_block_is_refused(weights: tuple[Path, np.ndarray]) -> None:
    path, _content = weights
    reader = DirectReader(path)
    with path.open("r+b") as file:
        file.truncate(PAGE + 904)
    try:
        with pytest.raises(StoreCorruptError, match="ends before byte"):
            reader.read([Read(0, page_memory(2 * PAGE), 2 * PAGE)])
    finally:
        reader.close()


def test_whatever_stops_the_reading_reaches_the_user() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.failure = RuntimeError("can't start new thread")  # type: ignore[assignment]
    streamer = WeightStreamer(spans(3, PAGE), [[page_memory(PAGE)] for _ in range(2)], reader)
    try:
        with pytest.raises(StoreError, match="can't start new thread"), streamer.extent(0):
            pass
    finally:
        streamer.close()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        DirectReader(tmp_path / "nothing")


def test_streams_a_real_file(tmp_path: Path) -> None:
    extents, nbytes = 4, 2 * PAGE
    path = tmp_path / "weights"
    path.write_bytes(content_of(extents, nbytes))
    memory = [[page_memory(nbytes)] for _ in range(2)]
    streamer = WeightStreamer(spans(extents, nbytes), memory, DirectReader(path))
    try:
        for number in range(3 * extents):
            with streamer.extent(number % extents) as slot:
                assert bytes(memory[slot][0]) == bytes([number % extents]) * nbytes
    finally:
        streamer.close()
    most = (3 * extents + len(memory)) * nbytes
    assert 3 * extents * nbytes <= streamer.bytes_read <= most
