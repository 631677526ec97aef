"""Weights through a window: each extent in its turn, read no more often than must be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.offload import (
    DirectReader,
    StoreCorruptError,
    StoreError,
    WeightStreamer,
    is_streamed,
)
from edge.offload.streaming.checked_extents import ExtentReader
from tests.support.streamed_extents import PAGE, MemoryReader, Places, content_of, spans

PATIENCE_S = 60.0
"""Only what hangs takes as long."""


def streamer_of(
    places: Places, reader: ExtentReader, *, resident: int, window: int = 2, nbytes: int = PAGE
) -> WeightStreamer:
    return WeightStreamer(
        spans(len(places.memory), nbytes),
        places.memory,
        reader,
        resident=resident,
        window=window,
        pages=places,
    )


def loose_of(extents: int, resident: int, window: int = 2) -> set[int]:
    """Which are read for each pass."""
    streamed = 0 if extents - resident <= window else extents - min(resident, extents)
    return {each for each in range(extents) if is_streamed(each, extents, streamed)}


@given(
    extents=st.integers(1, 7),
    window=st.integers(2, 4),
    residents=st.lists(st.integers(0, 8), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_every_use_finds_its_extent_however_many_stay(
    extents: int, window: int, residents: list[int]
) -> None:
    """A pass with each number of resident extents; it changes in the middle of the pass before."""
    reader = MemoryReader(content_of(extents, PAGE))
    places = Places(extents)
    streamer = streamer_of(places, reader, resident=residents[0], window=window)
    try:
        for resident, following in zip(residents, [*residents[1:], residents[-1]], strict=True):
            loose = loose_of(extents, resident, window)
            for index in range(extents):
                with streamer.extent(index):
                    assert bytes(places.memory[index][0]) == bytes([index + 1]) * PAGE
                    if index != extents // 2:
                        assert len(loose & set(places.held())) <= window
                    else:
                        streamer.keep(following)
                        loose = loose_of(extents, following, window)
    finally:
        streamer.close()


@given(extents=st.integers(1, 7), resident=st.integers(0, 7), passes=st.integers(1, 4))
@settings(max_examples=40)
def test_nothing_is_read_twice_that_stays(extents: int, resident: int, passes: int) -> None:
    reader = MemoryReader(content_of(extents, PAGE))
    places = Places(extents)
    streamer = streamer_of(places, reader, resident=resident)
    try:
        for _ in range(passes):
            for index in range(extents):
                with streamer.extent(index):
                    pass
    finally:
        streamer.close()
    loose = sorted(loose_of(extents, resident))
    expected = [*range(extents), *(index for _ in range(passes) for index in loose)]
    assert reader.offsets == [index * PAGE for index in expected[: len(reader.offsets)]]
    assert len(reader.offsets) >= extents + (passes - 1) * len(loose)


def test_reads_ahead_as_far_as_the_window_has_room_and_no_further() -> None:
    reader = MemoryReader(content_of(5, PAGE))
    streamer = streamer_of(Places(5), reader, resident=0, window=3)
    try:
        for _ in range(3):
            assert reader.asked.acquire(timeout=PATIENCE_S)
        with streamer.extent(0):
            pass
        assert reader.asked.acquire(timeout=PATIENCE_S)  # the room that became free
        with streamer.extent(1), streamer_is_idle(reader):
            pass
        assert reader.asked.acquire(timeout=PATIENCE_S)
    finally:
        streamer.close()
    in_turn = [index * PAGE for index in range(5)]
    assert reader.offsets == in_turn[: len(reader.offsets)]


class streamer_is_idle:
    """No read is asked for while the block runs: the extent in use keeps its room."""

    def __init__(self, reader: MemoryReader) -> None:
        self.reader = reader

    def __enter__(self) -> None:
        assert not self.reader.asked.acquire(blocking=False)

    def __exit__(self, *_: object) -> None:
        assert not self.reader.asked.acquire(blocking=False)


def test_less_to_keep_is_let_go_at_once() -> None:
    reader = MemoryReader(content_of(6, PAGE))
    places = Places(6)
    streamer = streamer_of(places, reader, resident=6)
    try:
        for index in range(6):
            with streamer.extent(index):
                pass
        reader.gate.clear()
        with streamer.extent(0):
            streamer.keep(2)
            assert set(places.held()) == {0, 3}
        reader.gate.set()
        for index in range(1, 6):
            with streamer.extent(index):
                assert bytes(places.memory[index][0]) == bytes([index + 1]) * PAGE
    finally:
        streamer.close()


def test_the_next_extents_are_asked_for_while_the_first_is_read() -> None:
    """So the disk goes from one to the next without a gap, however many threads read."""
    reader = MemoryReader(content_of(5, PAGE))
    reader.gate.clear()
    streamer = streamer_of(Places(5), reader, resident=0, window=3)
    try:
        assert [reader.asked.acquire(blocking=False) for _ in range(4)] == [True] * 3 + [False]
        assert reader.offsets == []
    finally:
        streamer.close()


def test_what_was_used_is_handed_to_what_is_read_next() -> None:
    reader = MemoryReader(content_of(5, PAGE))
    places = Places(5)
    streamer = streamer_of(places, reader, resident=1, window=2)
    try:
        for _ in range(2):
            for index in range(5):
                with streamer.extent(index):
                    pass
    finally:
        streamer.close()
    assert places.handed[:6] == [(1, 3), (2, 4), (3, 1), (4, 2), (1, 3), (2, 4)]
    assert places.supplied[:7] == [0, 1, 2, 3, 4, 1, 2], "before anything is read there"


def test_a_use_out_of_turn_is_refused() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    streamer = streamer_of(Places(3), reader, resident=0)
    try:
        with pytest.raises(ValueError, match="out of turn"), streamer.extent(1):
            pass
    finally:
        streamer.close()


def test_too_small_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot go through"):
        streamer_of(Places(2), MemoryReader(b""), resident=0, window=1)
    with pytest.raises(ValueError, match="cannot go through"):
        streamer_of(Places(0), MemoryReader(b""), resident=0)


def test_a_failing_disk_reaches_the_user() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.gate.clear()
    reader.failure = StoreError("the disk has gone")
    streamer = streamer_of(Places(3), reader, resident=0)
    try:
        reader.gate.set()
        with pytest.raises(StoreError, match="the disk has gone"), streamer.extent(0):
            pass
    finally:
        streamer.close()


def test_closing_frees_a_user_that_waits() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.gate.clear()
    streamer = streamer_of(Places(3), reader, resident=0)
    raised: list[StoreError] = []

    def use() -> None:
        try:
            with streamer.extent(0):
                raise AssertionError("it was never read")
        except StoreError as error:
            raised.append(error)

    user = threading.Thread(target=use)
    user.start()
    streamer.close()
    user.join()
    assert "closed" in str(raised[0])


def test_whatever_stops_the_reading_reaches_the_user() -> None:
    reader = MemoryReader(content_of(3, PAGE))
    reader.failure = RuntimeError("can't start new thread")  # type: ignore[assignment]
    streamer = streamer_of(Places(3), reader, resident=0)
    try:
        with pytest.raises(StoreError, match="can't start new thread"), streamer.extent(0):
            pass
    finally:
        streamer.close()


def test_streams_a_real_file(tmp_path: Path) -> None:
    extents, nbytes = 4, 2 * PAGE
    path = tmp_path / "weights"
    path.write_bytes(content_of(extents, nbytes))
    places = Places(extents, nbytes)
    streamer = streamer_of(places, DirectReader(path), resident=1, nbytes=nbytes)
    try:
        for number in range(3 * extents):
            index = number % extents
            with streamer.extent(index):
                assert bytes(places.memory[index][0]) == bytes([index + 1]) * nbytes
    finally:
        streamer.close()
    least = (1 + 3 * (extents - 1)) * nbytes
    assert least <= streamer.bytes_read <= least + 2 * nbytes


def test_a_file_that_is_written_to_meanwhile_is_compared_again(tmp_path: Path) -> None:
    """Other bytes are refused whenever they come; the same bytes, written again, are not."""
    extents, nbytes = 4, 2 * PAGE
    path = tmp_path / "weights"
    path.write_bytes(content_of(extents, nbytes))
    places = Places(extents, nbytes)
    streamer = streamer_of(places, DirectReader(path), resident=0, nbytes=nbytes)

    def write(index: int, content: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(index * nbytes)
            file.write(content)

    try:
        for number in range(3 * extents):
            index = number % extents
            with streamer.extent(index):
                assert bytes(places.memory[index][0]) == bytes([index + 1]) * nbytes
            write(index, bytes([index + 1]) * nbytes)
        write(2, b"x")
        for index in range(2):
            with streamer.extent(index):
                pass
        with pytest.raises(StoreCorruptError, match="other bytes"), streamer.extent(2):
            pass
    finally:
        streamer.close()


def test_a_write_after_the_reading_is_noticed_at_the_use() -> None:
    """What is read ahead may be written to before it is used: then it is read once more."""
    reader = MemoryReader(content_of(3, PAGE))
    streamer = streamer_of(Places(3), reader, resident=0)
    try:
        for index in (0, 1, 2):
            with streamer.extent(index):
                pass
        with streamer.extent(0):
            reader.pool.submit(int).result()  # 1 is there
            before = reader.offsets.count(PAGE)
            reader.version += 1
        with streamer.extent(1):
            pass
        assert reader.offsets.count(PAGE) == before + 1
    finally:
        streamer.close()
